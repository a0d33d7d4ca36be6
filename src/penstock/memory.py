"""How much memory this process can still allocate: what the node and its control group allow."""

from __future__ import annotations

from pathlib import Path

NO_LIMIT_BYTES = 2**60
"""Control groups write "no limit" as a number near 2**63."""


def memory_left_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process can still allocate."""
    free = (node_free_bytes(root), group_free_bytes(root))
    return min(
        (size_bytes for size_bytes in free if size_bytes is not None), default=NO_LIMIT_BYTES
    )


def node_free_bytes(root: Path = Path("/")) -> int | None:
    """Return what the kernel could hand out on this node; None where it does not say."""
    available_kib = _field(root / "proc/meminfo", "MemAvailable:")
    return None if available_kib is None else available_kib * 1024


def group_free_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process's control group may still take; None where there is no limit.

    Page cache that the kernel would give up first (inactive files) counts as free.
    """
    free = [
        max(0, limit - (used - reclaimable))
        for folder, names in _groups(root)
        if (limit := _number(folder / names[0])) is not None and limit < NO_LIMIT_BYTES
        if (used := _number(folder / names[1])) is not None
        for reclaimable in [min(used, _field(folder / "memory.stat", names[2]) or 0)]
    ]
    return min(free, default=None)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of our control group and of those above it, both versions."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, names = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        # In a container the path may be that of the host, and the mount is then our own group: so
        # the folders above are looked at as well, up to the mount itself.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            found += [
                (root.joinpath(mount, *parts[:depth]), names) for depth in range(len(parts), -1, -1)
            ]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
