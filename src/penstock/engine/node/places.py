"""The memories and disks of a service, locked against other services."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.node.folders import found_sets
from penstock.errors import OptionError
from penstock.storage.tier_folders import Folder, is_shared_by_nodes
from penstock.storage.tier_identity import identity_in
from penstock.storage.tier_sizes import TierAllowance, Wish, usable_bytes, wished_bytes
from penstock.units import show_bytes

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK = "service.lock"
_SMALLEST_BYTES = 2**20

_log = logging.getLogger("penstock.engine.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """A memory or a disk that this service has locked."""

    kind: str
    capacity_bytes: int
    root: Folder
    lock: int
    """A descriptor that holds the lock; closing it gives the place back."""

    def close(self) -> None:
        """Give the place back, so that another service can take it."""
        self.root.close()
        os.close(self.lock)


def take_places(wishes: Sequence[Wish]) -> list[TierPlace]:
    """Lock all places. One that cannot be used is an error: people set a service up by hand."""
    places: list[TierPlace] = []
    try:
        for wish in wishes:
            places.append(_place(wish))  # noqa: PERF401 - those taken so far are given back
    except BaseException:
        for place in places:
            place.close()
        raise
    return places


def _place(wish: Wish) -> TierPlace:
    root = _root(wish)
    try:
        lock = take_lock(root.path, _LOCK, f"the {wish.kind} in {wish.place}")
    except BaseException:
        root.close()
        raise
    held_bytes = sum(found.held_bytes for found in found_sets(root))
    return TierPlace(
        kind=wish.kind, capacity_bytes=_capacity(wish, root, held_bytes), root=root, lock=lock
    )


def _root(wish: Wish) -> Folder:
    name = "penstock-node" if os.geteuid() == 0 else f"penstock-node-{os.geteuid()}"
    path = f"{wish.place.rstrip('/')}/{name}"
    try:
        _check_local(wish.place)
        os.makedirs(path, 0o711, exist_ok=True)  # noqa: PTH103
        descriptor = os.open(path, _FLAGS | os.O_NOFOLLOW)
    except OSError as error:
        raise OptionError(
            f"{path} cannot hold a {wish.kind} tier ({error.strerror}); make the folder or name "
            "another"
        ) from error
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        os.close(descriptor)
        raise OptionError(
            f"{path} belongs to user {status.st_uid} and this service runs as user "
            f"{os.geteuid()}; remove it or name another folder"
        )
    os.fchmod(descriptor, 0o711)  # jobs pass through, and cannot see whose data sets there are
    return Folder(path=path, descriptor=descriptor)


def _check_local(place: str) -> None:
    descriptor = os.open(place, _FLAGS)
    try:
        if is_shared_by_nodes(descriptor):
            raise OptionError(
                f"{place} is shared with other machines, and a tier belongs to one; give a folder "
                "on a local disk"
            )
    finally:
        os.close(descriptor)


def _capacity(wish: Wish, root: Folder, held_bytes: int) -> int:
    """Return how many bytes may be granted here: the wished ones, or fewer if fewer are free."""
    status = os.fstatvfs(root.descriptor)
    # A tmpfs without a limit reports no blocks at all.
    free_bytes = status.f_bavail * status.f_frsize if status.f_blocks else 2**60
    allowance = TierAllowance(
        free_bytes=free_bytes + held_bytes,
        bound=f"{wish.place} ({show_bytes(status.f_blocks * status.f_frsize)} in all)",
        way_out="free some space or give less",
    )
    wished, usable = wished_bytes(wish, allowance), usable_bytes(wish, allowance)
    if usable < _SMALLEST_BYTES:
        raise OptionError(
            f"{allowance.bound} has {show_bytes(usable)} left, too little for a {wish.kind} tier; "
            f"{allowance.way_out}"
        )
    if usable < wished:
        _log.warning(
            "the %s in %s will be %s instead of %s, because of the limit of %s; %s",
            wish.kind, wish.place, show_bytes(usable), show_bytes(wished), allowance.bound,
            allowance.way_out,
        )  # fmt: skip
    return min(wished, usable)


def take_lock(folder: str, name: str, what: str) -> int:
    """Return a descriptor that holds a lock; the error names the service that has it."""
    path = f"{folder}/{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise OptionError(
            f"another node service (process {pid}) has {what}; stop it first, or give this one "
            "something else"
        ) from None
    # For the error message of a second service; the lock itself goes with this process.
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def identity_of(places: Sequence[TierPlace], beside: str) -> str:
    """Return the name of this node. It lies on the first disk, else beside the socket.

    So it lives as long as the data: a reboot clears memory tiers, and the socket's folder as well.
    """
    disks = [place.root.path for place in places if place.kind == "disk"]
    folder, _, socket = beside.rpartition("/")
    return identity_in(disks[0]) if disks else identity_in(folder or "/", f"{socket}.identity")
