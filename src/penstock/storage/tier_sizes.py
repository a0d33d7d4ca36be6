"""The size that a user wishes for a tier, and the size that the node allows.

A wish is a size or a share of the free room. Three bounds limit memory: what the kernel has
available, what the control group of this process (a container, a Slurm job) may still allocate, and
the size of the tmpfs where the tier lies. The file system of a disk reports its free room. Bytes
that a tier already holds count as free for this tier, since they are not needed twice.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from penstock.errors import OptionError
from penstock.memory import NO_LIMIT_BYTES, group_free_bytes, node_free_bytes
from penstock.units import bytes_of, show_bytes

SHARED_MEMORY = "/dev/shm"

_RESERVE_BYTES_MAX = 2**30
_RESERVE_SHARES = {"memory": 0.05, "disk": 0.01}
"""The share of the free room that a tier leaves free: a completely full disk or memory would break
other programs."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A tier in memory: `Memory("8GB")`, or `Memory("50%")` of what is free when it is opened.

    It lies in /dev/shm; `Memory("8GB", folder="/mnt/tmpfs")` takes another tmpfs.
    """

    size: int | str
    # Keyword only: `Disk` takes its folder first, and users should not have to remember two orders.
    folder: str | os.PathLike[str] | None = field(default=None, kw_only=True)

    kind: ClassVar[Literal["memory"]] = "memory"

    def __post_init__(self) -> None:
        _check_size(self.size, 'penstock.Memory("8GB")')
        if self.folder is not None:
            _check_folder(self.folder)

    @property
    def place(self) -> str:
        """Return the folder of the tier, with links resolved."""
        return _real(SHARED_MEMORY if self.folder is None else self.folder)


@dataclass(frozen=True, slots=True)
class Disk:
    """A tier on a local disk: `Disk("/scratch", "200GB")`, or `"50%"` of what is free.

    The folder comes first: a disk tier has to lie somewhere.
    """

    folder: str | os.PathLike[str]
    size: int | str

    kind: ClassVar[Literal["disk"]] = "disk"

    def __post_init__(self) -> None:
        _check_folder(self.folder)
        if _is_size(self.folder) and not _is_size(self.size):
            raise OptionError(
                f"Disk({str(self.folder)!r}, {str(self.size)!r}): the folder comes first; write "
                f"penstock.Disk({str(self.size)!r}, {str(self.folder)!r})"
            )
        _check_size(self.size, 'penstock.Disk("/scratch", "200GB")')

    @property
    def place(self) -> str:
        """Return the folder of the tier, with links resolved."""
        return _real(self.folder)


def _real(folder: str | os.PathLike[str]) -> str:
    return str(Path(folder).expanduser().resolve())


Wish = Memory | Disk


def memory_of(text: str) -> Memory:
    """Return the memory tier that the text of an option names: SIZE, or FOLDER:SIZE.

    >>> memory_of("8GB"), memory_of("/mnt/tmpfs:50%")
    (Memory(size='8GB', folder=None), Memory(size='50%', folder='/mnt/tmpfs'))
    """
    folder, _, size = text.rpartition(":")
    if not _is_size(size):
        raise OptionError(
            f"--memory {text!r} has no size; write for example --memory 64GB, or "
            "--memory FOLDER:64GB for a tmpfs other than /dev/shm"
        )
    return Memory(size, folder=folder or None)


def disk_of(text: str) -> Disk:
    """Return the disk tier that the text of an option names: FOLDER:SIZE.

    >>> disk_of("/nvme:2TB")
    Disk(folder='/nvme', size='2TB')
    """
    folder, _, size = text.rpartition(":")
    if not folder or not _is_size(size):
        lacks = "folder" if _is_size(text) else "size"
        raise OptionError(
            f"--disk {text!r} has no {lacks}; write --disk FOLDER:SIZE, for example "
            "--disk /nvme:2TB or --disk /nvme:80%"
        )
    return Disk(folder, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAllowance:
    """The room that a tier may take."""

    free_bytes: int
    bound: str
    """The limit behind it, in words."""
    way_out: str
    """What the user can do to raise the limit."""


def _check_size(size: int | str, example: str) -> None:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise OptionError(f"{size!r} is not a size; write for example {example}")
    share = _share_of(size)
    if share is not None and not 0 < share <= 1:
        raise OptionError(f"a share of what is free lies between 0% and 100%, got {size!r}")
    if share is None and bytes_of(size) == 0:
        raise OptionError(f"a tier of size {size!r} holds nothing; leave it out of the tiers")


def _check_folder(folder: str | os.PathLike[str]) -> None:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise OptionError(
            f"{folder!r} is not a folder; write for example penstock.Disk('/scratch', '200GB')"
        )


def _is_size(value: object) -> bool:
    if not isinstance(value, int | str):
        return False
    try:
        return _share_of(value) is not None or bytes_of(value) >= 0
    except OptionError:
        return False


def _share_of(size: int | str) -> float | None:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", size) if isinstance(size, str) else None
    return None if match is None else float(match[1]) / 100


def wished_bytes(wish: Wish, allowance: TierAllowance) -> int:
    """Return the size that a wish means."""
    share = _share_of(wish.size)
    return bytes_of(wish.size) if share is None else int(share * allowance.free_bytes)


def usable_bytes(wish: Wish, allowance: TierAllowance) -> int:
    """Return the largest possible size of a tier: the free room less a small reserve."""
    reserve_bytes = min(_RESERVE_BYTES_MAX, int(_RESERVE_SHARES[wish.kind] * allowance.free_bytes))
    return max(0, allowance.free_bytes - reserve_bytes)


def allowance_for(wish: Wish, folder: str, *, root: Path = Path("/")) -> TierAllowance:
    """Return the free room for a tier in a folder; files of other tiers count as used."""
    disk = _room_of_folder(wish, folder)
    if wish.kind == "disk":
        return disk
    return min(disk, *_memory_allowances(root), key=lambda allowance: allowance.free_bytes)


def _room_of_folder(wish: Wish, folder: str) -> TierAllowance:
    status = os.statvfs(folder)
    total_bytes = status.f_blocks * status.f_frsize
    if wish.kind == "memory":
        way_out = "enlarge it (docker run --shm-size, or mount -o remount,size=...)"
    else:
        way_out = "free some space or wish for less"
    return TierAllowance(
        # A tmpfs without a limit reports no blocks at all.
        free_bytes=status.f_bavail * status.f_frsize if status.f_blocks else NO_LIMIT_BYTES,
        bound=f"{folder} ({show_bytes(total_bytes)} in all)",
        way_out=way_out,
    )


def _memory_allowances(root: Path) -> list[TierAllowance]:
    allowances = []
    available_bytes = node_free_bytes(root)
    if available_bytes is not None:
        allowances.append(
            TierAllowance(
                free_bytes=available_bytes,
                bound="the memory available on this node",
                way_out="end other programs or wish for less",
            )
        )
    group_bytes = group_free_bytes(root)
    if group_bytes is not None:
        allowances.append(
            TierAllowance(
                free_bytes=group_bytes,
                bound="the memory limit of this container or job",
                way_out="start it with more memory or wish for less",
            )
        )
    return allowances
