"""Where a job runs: its command line, and the disk, the store and the network that it meets.

A slow disk is a cgroup with a limit on what it reads from the device, so it is slow for pages that
are not in the page cache, as a real one is. A slow network is a loopback interface of its own with
a token bucket. A slow store is `testkit.shaper`. The job sees none of this.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from testkit.shaper import Shape, Shaper

JOBS = Path(__file__).parent / "jobs"
ROOT = Path(__file__).parents[2]
BLKIO = Path("/sys/fs/cgroup/blkio")
PRIORITY = int(os.environ.get("PLANTED_NICE", "0"))
"""Of jobs, as `nice` counts: -10 keeps the noise of other programs on this machine out."""
_MAIN = "import sys; from penstock.cli.main import main; sys.exit(main())"
TRACE = [sys.executable, "-c", _MAIN, "trace"]
LIMIT_S = 90.0
"""A job that takes longer has failed."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A job and its surroundings, as a value."""

    script: str
    """A file of `jobs`, without `.py`."""
    data: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """`True` is a flag without a value; tuples are several values."""
    ranks: int = 1
    """More than one: under torchrun."""
    store: Shape | None = None
    """Serve `data` by S3 and http, in this shape."""
    disk_bytes_s: int = 0
    """What the job reads from the device in a second; 0: no limit."""
    disk_reads_s: int = 0
    page_cache: str = "warm"
    """`warm`; `cold`: empty at the start; `none`: pages are dropped all the time, as where the set
    is much larger than memory."""
    network_bits_s: int = 0
    """Of the loopback interface that ranks talk over; 0: no limit."""
    has_filled_cache: bool = False
    """The job has run before: its disk tier holds what fits."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def can_run(self) -> str:
        """Return why this site cannot be set up here; empty if it can."""
        if (self.disk_bytes_s or self.disk_reads_s) and not os.access(BLKIO / "tasks", os.W_OK):
            return "a slow disk needs root and the blkio controller of cgroup v1"
        if (self.disk_bytes_s or self.disk_reads_s) and not os.major(self._device):
            return f"{self.data} lies on no disk; name another folder with --data"
        if self.network_bits_s and (os.geteuid() or not shutil.which("tc")):
            return "a slow network needs root and tc"
        return ""

    @property
    def _device(self) -> int:
        return self.data.stat().st_dev if self.data is not None else 0


def throughput(site: Site, *, trace: Path | None = None) -> float:
    """Run the job and return the samples a second that it prints; with `trace`, record it."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planted-")))
        (scratch / "cache").mkdir()
        data, shaper = _served(site, stack)
        command = _command(site, data, scratch)
        if site.has_filled_cache:
            _run(command, site, scratch)
        if shaper is not None and site.store is not None:
            shaper.reshape(site.store)
        prefix = _throttled(site, stack)
        if trace is not None:
            command = [*TRACE, "--out", str(trace), "--", *command]
        _set_pages(site, stack)
        return _run([*prefix, *command], site, scratch)


def _served(site: Site, stack: contextlib.ExitStack) -> tuple[list[str], Shaper | None]:
    """Return the job's arguments that name its data, and the store, which has no limits yet."""
    if site.data is None:
        return [], None
    name = "rows.npy" if site.script == "rows" else ""
    if site.store is None:
        return [str(site.data / name)], None
    shaper = stack.enter_context(Shaper.of_folder(site.data))
    if site.script == "rows":
        return [f"{shaper.uri}{name}", "--endpoint", shaper.endpoint], shaper
    return [shaper.url], shaper


def _command(site: Site, data: list[str], scratch: Path) -> list[str]:
    python = [sys.executable]
    if site.ranks > 1:
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(site.ranks)]
        python += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    command = [*python, str(JOBS / f"{site.script}.py"), *data]
    for name, value in site.flags.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else (value,)
        if value is True:
            command.append(flag)
        elif value is not False:
            command += [flag, *(str(v).replace("SCRATCH", str(scratch)) for v in values)]
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(command: list[str], site: Site, scratch: Path) -> float:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **site.environment}
    # Every store of this benchmark has the same address: an index of another one must not be found.
    environment["PENSTOCK_CACHE"] = str(scratch / "index")
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=LIMIT_S)
    finally:
        # A job that takes too long has workers: all of its session ends.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    lines = [line for line in out.splitlines() if line.startswith('{"samples_s"')]
    if job.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)}\n{out[-2000:]}\n{err[-4000:]}")
    return float(json.loads(lines[-1])["samples_s"])


def _throttled(site: Site, stack: contextlib.ExitStack) -> list[str]:
    """Return what comes before the command so that it runs under the site's limits."""
    prefix: list[str] = []
    if PRIORITY:
        # Linux shares cores out between sessions first, and by `nice` inside of each.
        enter = f'echo {PRIORITY} > /proc/self/autogroup; exec nice -n {PRIORITY} "$@"'
        prefix += ["sh", "-c", enter, "sh"]
    if site.disk_bytes_s or site.disk_reads_s:
        assert site.data is not None
        group = stack.enter_context(_slow_disk(site))
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        prefix += ["sh", "-c", enter, "sh"]
    if site.network_bits_s:
        shape = (
            f"tc qdisc add dev lo root tbf rate {site.network_bits_s}bit burst 256kb latency 50ms"
        )
        prefix += ["unshare", "-n", "sh", "-c", f'ip link set lo up && {shape} && exec "$@"', "sh"]
    return prefix


@contextlib.contextmanager
def _slow_disk(site: Site) -> Iterator[Path]:
    """A cgroup whose processes read slowly from the disk that holds the data."""
    assert site.data is not None
    device = site.data.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    group = BLKIO / f"planted-{os.getpid()}"
    group.mkdir()
    try:
        if site.disk_bytes_s:
            (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {site.disk_bytes_s}")
        if site.disk_reads_s:
            (group / "blkio.throttle.read_iops_device").write_text(f"{disk} {site.disk_reads_s}")
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup; workers of the job may need a moment to end after it."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def _set_pages(site: Site, stack: contextlib.ExitStack) -> None:
    if site.data is None:
        return
    files = [path.open("rb") for path in site.data.iterdir() if path.is_file()]
    for file in files:
        stack.callback(file.close)
        file.read()
        if site.page_cache != "warm":
            os.fsync(file.fileno())  # A page that is not written yet cannot be dropped.
    if site.page_cache != "warm":
        _drop(files)
    if site.page_cache == "none":
        stop = threading.Event()
        dropper = threading.Thread(target=_drop_until, args=(files, stop))
        dropper.start()
        stack.callback(dropper.join)
        stack.callback(stop.set)


def _drop(files: list[BinaryIO]) -> None:
    for file in files:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _drop_until(files: list[BinaryIO], stop: threading.Event) -> None:
    while not stop.wait(0.1):
        _drop(files)
