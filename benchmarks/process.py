"""Tasks run in the environment of a peer, each in a process of its own that ends in time."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from benchmarks.inside import MARK
from benchmarks.peers import EVERYONE, SHARED_FORMATS
from benchmarks.peers.setup import ROOT, python_of
from benchmarks.works import Work

REASON_CHARS = 160
DATA = "data-2"
"""Folder of everybody's formats. The number rises with each change of what a sample holds."""
# A loader shares out the cores itself; pools of its numeric libraries would contend with it.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITDATA_DISABLE_VERSION_CHECK": "1"}


def ask(root: Path, task: dict, *, timeout_s: float) -> dict:
    """Return the result of a task, or why there is none."""
    if not (python := interpreter(root, task["peer"])).exists():
        return {"failed": f"no environment {python}: run python -m benchmarks.peers.setup"}
    task = task | {"started_at": time.time()}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [str(python), "-m", "benchmarks.inside", json.dumps(task)]
        code = run_to_end(command, out, err, timeout_s=timeout_s)
        out.seek(0)
        err.seek(0)
        if result := result_in(out.read()):
            return result
        late = f"nothing after {timeout_s:.0f} s"
        return {"failed": late if code is None else last_words(err.read(), code)}


def run_to_end(command: list[str], out: TextIO, err: TextIO, *, timeout_s: float) -> int | None:
    """Return the exit status, or nothing when time ran out. Worker processes end with it."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | ONE_THREAD | OFFLINE,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        return child.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def interpreter(root: Path, peer: str) -> Path:
    """Return the Python of a peer. The calling one serves where it is likely to have the packages.

    So limits, Penstock and torch can be measured on a machine on which nothing can be installed.
    """
    python = python_of(root, "base" if peer == "limit" else peer)
    is_here = peer in ("limit", "ours", "torch") and not python.exists()
    return Path(sys.executable) if is_here else python


def result_in(out: str) -> dict | None:
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else None


def last_words(err: str, code: int | None) -> str:
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or [f"exit status {code}"])[-1][:REASON_CHARS]


def task_for(root: Path, peer: str, work: Work, variant: str, mode: str, **more: object) -> dict:
    return {
        "mode": mode,
        "peer": peer,
        "work": work.name,
        "variant": variant,
        "folder": str(folder_of(root, work, EVERYONE[peer].formats[work.name])),
        "source": str(folder_of(root, work, "source")),
        **more,
    }


def folder_of(root: Path, work: Work, format_name: str) -> Path:
    return root / DATA / work.name / format_name


def ensure_written(root: Path, peer: str, work: Work, *, timeout_s: float = 1800) -> dict:
    """Write what a peer reads unless it is there; a half-written format never gets its name."""
    format_name = EVERYONE[peer].formats[work.name]
    folder = folder_of(root, work, format_name)
    record = folder.parent / f"{format_name}.json"
    if record.exists():
        return json.loads(record.read_text())
    if format_name != "source":
        ensure_written(root, "limit", work)
    partial = folder.with_name(f"{format_name}.partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    writer = "limit" if format_name in SHARED_FORMATS else peer
    task = task_for(root, peer, work, "", "write", format=format_name)
    result = ask(root, task | {"peer": writer, "folder": str(partial)}, timeout_s=timeout_s)
    if "failed" not in result:
        partial.rename(folder)
        record.write_text(json.dumps(result))
    return result


def warm(folder: Path) -> None:
    """Read a format once, so that everyone finds it in the page cache."""
    buffer = bytearray(1 << 22)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
