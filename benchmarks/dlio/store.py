"""Stores that all loaders can read: files in the page cache, or on a disk of a given bandwidth.

DLIO's torch loader reads files only, so the store cannot be an object store. A disk gets its
bandwidth from the kernel: a control group (version 1, `blkio.throttle`) that DLIO and all its
processes run in. The same group counts what the disk has served. It needs root, and a data folder
on a block device.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")


def can_limit() -> bool:
    return os.access(GROUPS / "cgroup.procs", os.W_OK)


def warm(files: list[Path]) -> None:
    """Bring files into the page cache."""
    for path in files:
        path.read_bytes()


def forget(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)  # pages that are not written yet would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_rate(files: list[Path]) -> float:
    """Return bytes a second of the disk itself, files read whole, one after the other."""
    forget(files)
    started = time.perf_counter()
    size_bytes = sum(len(path.read_bytes()) for path in files)
    return size_bytes / (time.perf_counter() - started)


class Limit:
    """A control group with a limit on what the disk of a folder serves."""

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        device = folder.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        self._group = GROUPS / f"penstock_dlio_{os.getpid()}"
        self._bytes_per_s = int(bytes_per_s)

    def inside(self, command: list[str]) -> list[str]:
        """Return a command that runs another one in the group."""
        return ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def served_bytes(self) -> int:
        """Bytes that the disk has served to the group."""
        text = (self._group / "blkio.throttle.io_service_bytes").read_text()
        found = re.search(rf"^{self._device} Read (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def __enter__(self) -> "Limit":
        self._group.mkdir()
        (self._group / "blkio.throttle.read_bps_device").write_text(
            f"{self._device} {self._bytes_per_s}"
        )
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(50):  # the last processes of a run leave the group a moment after it
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def limited(folder: Path, bytes_per_s: float | None) -> Iterator[Limit | None]:
    """Give a group with this limit, or None where there is no limit."""
    if bytes_per_s is None:
        yield None
    else:
        with Limit(folder, bytes_per_s) as limit:
            yield limit
