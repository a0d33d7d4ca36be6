"""Running a job under trace: its environment, its end, and what is known of it from outside."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import OptionError
from penstock.trace.boot import boot_id
from penstock.trace.chunks import chunks_of
from penstock.trace.foreign import strace
from penstock.trace.foreign.library import preload_library
from penstock.trace.foreign.process import PROBLEMS, WITH_VARIABLE
from penstock.trace.host import system_facts
from penstock.trace.native import pack_native
from penstock.trace.recorder import TRACE_VARIABLE, Recorder
from penstock.trace.sampler import Sampler
from penstock.trace.windows import DIFFERENTIAL_VARIABLE

VIEWS = ("auto", "python", "preload", "strace")
_FOLDER_BYTES_MAX = 1000
"""What the preloaded library has room for."""
_STARTUP = Path(__file__).with_name("startup")

_NEVER_SEEN = (
    "pages that are read through a memory mapping (MAP rows say which files are mapped)",
    "lines that native code reads by fgets and getline",
    "reads by io_uring and by programs without the C library",
)
_PYTHON_ONLY = (
    "single reads, their offsets and sizes: each batch has the sum of bytes that its thread read, "
    "and files have the time when Python opened them",
    "reads of native threads, and files that native code opens",
    "how long threads waited for the interpreter's lock",
)
_STRACE_ONLY = (
    "how long threads waited for the interpreter's lock",
    "true speed: strace stops the job at every call, so its times are those of a slower job",
)


@dataclass(frozen=True, kw_only=True)
class TracedJob:
    """A command to run under trace."""

    command: tuple[str, ...]
    folder: Path
    """Of the run; absolute."""
    view: str = "auto"
    """One of `VIEWS`."""
    differential: int = 0
    """Steps of a differential window; 0: none."""
    prints_to_stderr: bool = False
    """Whether what the job prints goes to stderr: where stdout is for an answer about the job."""

    def __post_init__(self) -> None:
        if not self.command:
            raise OptionError(
                "there is no command to trace; write it behind --, for example: penstock trace -- "
                "python train.py"
            )
        if shutil.which(self.command[0]) is None:
            raise OptionError(f"there is no program {self.command[0]!r}; is it on PATH?")
        if len(os.fsencode(self.folder)) > _FOLDER_BYTES_MAX:
            raise OptionError(
                f"the name of the trace's folder has {len(os.fsencode(self.folder))} bytes, and "
                f"{_FOLDER_BYTES_MAX} are possible; --out names another folder"
            )
        if any(_is_of_this_machine(path) for path in self.folder.glob("*-launch-*.trace")):
            raise OptionError(f"{self.folder} holds a trace already; --out names another folder")


def _is_of_this_machine(path: Path) -> bool:
    """Tell a trace of an earlier job from one that another node of this job writes."""
    head = next(chunks_of(path.read_bytes()), None)
    return head is not None and head[0].get("boot") == boot_id()


@dataclass(frozen=True, kw_only=True)
class _JobView:
    """How a job is seen."""

    library: Path | None = None
    """The library to preload."""
    has_strace: bool = False
    problem: str = ""
    """Why it is not the best view."""

    @property
    def name(self) -> str:
        """One of `VIEWS`, as hooks in the job are told."""
        return "strace" if self.has_strace else "preload" if self.library else "python"

    @property
    def fact(self) -> dict[str, Any]:
        has_preload = self.library is not None
        hidden: tuple[str, ...] = _NEVER_SEEN
        if self.has_strace:
            hidden += _STRACE_ONLY
        elif not has_preload:
            hidden += _PYTHON_ONLY
        if self.problem:
            hidden += (self.problem,)
        return {
            "python": True,
            "preload": has_preload,
            "strace": self.has_strace,
            "cannot_see": list(hidden),
        }


def run_job(job: TracedJob) -> int:
    """Run a job and record it; return its exit status, 128 + N if a signal N ended it."""
    view = _view_of(job.view)
    job.folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(job.folder, role="launch")
    recorder.facts(_facts(job, view))
    command = list(job.command)
    if view.has_strace:
        command = strace.command_of(job.folder, command)
    begun_ns = time.perf_counter_ns(), time.time_ns()
    try:
        status = _run(job, command, _environment(job, view), recorder)
    finally:
        if view.has_strace:
            strace.read_log(job.folder, perf_ns=begun_ns[0], time_ns=begun_ns[1])
        fact = _with_problems(view.fact, job.folder)
        if problem := pack_native(job.folder):
            fact["cannot_see"] = [*fact["cannot_see"], problem]
        recorder.facts({"tracing": fact})
        recorder.close()
    return status


def _view_of(name: str) -> _JobView:
    if name == "python":
        return _JobView()
    if name == "strace":
        if shutil.which("strace") is None:
            raise OptionError("--with strace needs strace, which is not installed")
        return _JobView(has_strace=True)
    library, problem = preload_library()
    if library is None and name == "preload":
        raise OptionError(problem)
    return _JobView(library=library, problem=problem)


def _environment(job: TracedJob, view: _JobView) -> dict[str, str]:
    environment = dict(os.environ)
    environment[TRACE_VARIABLE] = str(job.folder)
    environment[WITH_VARIABLE] = view.name
    paths = [str(_STARTUP), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if view.library is not None:
        loaded = [str(view.library), environment.get("LD_PRELOAD", "")]
        environment["LD_PRELOAD"] = ":".join(filter(None, loaded))
    if job.differential:
        environment[DIFFERENTIAL_VARIABLE] = str(job.differential)
    return environment


def _run(
    job: TracedJob, command: Sequence[str], environment: dict[str, str], recorder: Recorder
) -> int:
    out = sys.stderr.fileno() if job.prints_to_stderr else None
    child = subprocess.Popen(command, env=environment, stdout=out)
    sampler = Sampler(recorder, lambda: _process_tree(child.pid), of_node=True)
    sampler.start()
    # Ctrl-C reaches the child as well, being in our process group; it decides how it ends.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT,)}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        before[number] = signal.signal(number, lambda n, _: child.send_signal(n))
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sampler.stop()
    return 128 - status if status < 0 else status


def _process_tree(root: int) -> list[int]:
    """Return a process and all that descend from it; those whose parent has gone are missing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                # The name of a program is in brackets and may hold anything.
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _facts(job: TracedJob, view: _JobView) -> dict[str, Any]:
    return {
        "command": shlex.join(job.command),
        "tracing": view.fact,
        **system_facts(Path.cwd()),
    }


def _with_problems(fact: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add what failed inside the job."""
    path = folder / PROBLEMS
    if path.exists():
        found = list(dict.fromkeys(path.read_text(errors="replace").splitlines()))
        if any(line.startswith("no hooks for torch.utils.data") for line in found):
            fact["python"] = False
        fact["cannot_see"] = [*fact["cannot_see"], *found]
    for passes in folder.glob(f"{socket.gethostname()}-*.passes"):
        passes.unlink()
    return fact
