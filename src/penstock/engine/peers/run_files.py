"""Files by which commands find a running job: each has the job's members and its secret.

    $XDG_RUNTIME_DIR/penstock/runs/RUN.HOST.json      else ~/.cache/penstock/runs/RUN.HOST.json

One process of each node writes such a file, readable for its user only (mode 0600), and removes it
at the end. If the process has died, the next reader removes the file. Only the machine and
container where the process ran can tell whether it has died; but homes are often shared between
machines. Elsewhere, only an answer from a member shows that the run is alive.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES, shown
from penstock.engine.peers.node_messages import ListedRun, RunMember
from penstock.engine.peers.runs import is_in_sight, is_of_this_boot, is_running, process_mark

FORMAT = 1
_BYTES_MAX = 4 * 2**20


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: a run, and the process that wrote it."""

    format: int = FORMAT
    run_id: str
    """In hexadecimal digits, as the secret."""
    secret: str
    members: tuple[RunMember, ...]
    dataset: str = ""
    """Its URI, for people."""
    mark: str
    """Identifies its process (`process_mark`)."""
    host: str

    def __repr__(self) -> str:
        return shown(self)

    @property
    def is_alive(self) -> bool | None:
        """Whether its process runs; None if that cannot be told from here."""
        if is_in_sight(self.mark):
            return is_running(self.mark)
        if self.host == _host() and not is_of_this_boot(self.mark):
            return False  # This machine has been rebooted since.
        return None

    @property
    def run(self) -> ListedRun:
        """The run that the file describes."""
        return ListedRun(
            run_id=bytes.fromhex(self.run_id),
            secret=bytes.fromhex(self.secret),
            members=self.members,
            dataset=self.dataset,
        )


def runs_folder() -> Path:
    """Return the folder for files of runs; it need not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "penstock" / "runs"
    base = os.environ.get("PENSTOCK_CACHE")
    if base is None:
        base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock")
    return Path(base) / "runs"


def write_run_file(
    *, run_id: bytes, secret: bytes, members: Sequence[RunMember], dataset: str = ""
) -> Path:
    """Write the file of a run and return its path, which `remove_run_file` takes at the end."""
    assert (len(run_id), len(secret)) == (RUN_BYTES, SECRET_BYTES)
    folder = runs_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep_run_files()
    file = RunFile(
        run_id=run_id.hex(),
        secret=secret.hex(),
        members=tuple(members),
        dataset=dataset,
        mark=process_mark(),
        host=_host(),
    )
    path = folder / f"{run_id.hex()}.{_host()}.json"
    # Renamed when it is complete, so that readers never see half of it.
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.json.encode(file))
    temporary.replace(path)
    return path


def remove_run_file(path: Path) -> None:
    """Remove the file of a run, if this process wrote it."""
    file = _read(path)
    if file is not None and file.mark == process_mark():
        with contextlib.suppress(OSError):
            path.unlink()


def read_run_files() -> list[RunFile]:
    """Return the runs of this user that are not known to be over, the newest first."""
    dated = []
    for path in _files(runs_folder()):
        file = _read(path)
        if file is not None and file.is_alive is not False:
            with contextlib.suppress(OSError):
                dated.append((path.stat().st_mtime, file))
    return [file for _, file in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def sweep_run_files() -> None:
    """Remove files of processes that are known to have died."""
    for path in _files(runs_folder()):
        file = _read(path)
        if file is not None and file.is_alive is False:
            with contextlib.suppress(OSError):
                path.unlink()


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError:
        return []


def _read(path: Path) -> RunFile | None:
    """Read a file; None if it is damaged or belongs to another user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            read = msgspec.json.decode(file.read(_BYTES_MAX), type=RunFile)
            assert read.run  # raises if the digits are not hexadecimal
            return read
    except (OSError, ValueError):
        return None


def _host() -> str:
    return os.uname().nodename.replace("/", "_")
