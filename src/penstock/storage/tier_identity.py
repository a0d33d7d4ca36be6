"""The identity of a node: a name of 32 hex digits, stored where its bytes are stored.

The homes of units depend on the names of nodes. Because the name lies on the disk, a node that
restarts with another address or other ranks keeps its units. A node without a disk loses its units
when it restarts, so its name lies beside the first memory tier and is lost with it; until then, all
ranks of the node have the same name.

Two disks with the same name, as after copying a machine, would be the same home. Joining a run
refuses that; to get a new name, remove the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import xxhash

from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.storage.tier_folders import IDENTITY, Folder

_TRIES_MAX = 3
_READ_BYTES_MAX = 64

_log = logging.getLogger("penstock.storage")


def identity_of(tiers: Sequence[tuple[str, str]]) -> str:
    """Return the name of a node, given the kinds and folders of its tiers."""
    disks = [path.rpartition("/")[0] for kind, path in tiers if kind == "disk"]
    places = disks or [path for _, path in tiers]
    return identity_in(places[0]) if places else secrets.token_hex(16)


def identity_in(path: str, file: str = IDENTITY) -> str:
    """Return the name in a file of a folder; the first process to come makes it."""
    folder = Folder(path=path, descriptor=os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        return _kept_in(folder, file)
    finally:
        folder.close()


def _kept_in(folder: Folder, file: str) -> str:
    for _ in range(_TRIES_MAX):  # another process may make the file between the two lines
        found = read_identity(folder, file)
        if found is not None:
            return found
        _make(folder, file)
    # There is no room, or a file that we did not write. All ranks of the node must still agree.
    _log.warning(
        "%s/%s holds no name of a node and cannot be made, so this machine gets a name until its "
        "next reboot; remove the file, or make some room there",
        folder.path,
        file,
    )
    here = f"{os.uname().nodename} {_boot_id()} {folder.path}"
    return xxhash.xxh3_128_hexdigest(here.encode())


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_identity(folder: Folder, file: str = IDENTITY) -> str | None:
    """Return the name in a folder; None if there is none."""
    try:
        descriptor = folder.open_file(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(descriptor, _READ_BYTES_MAX).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    return text if re.fullmatch("[0-9a-f]{32}", text) else None


def _make(folder: Folder, file: str) -> None:
    """Write a file, then link it to its name; `link` fails if another process was first."""
    temporary, inside = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}", folder.descriptor
    with contextlib.suppress(OSError):
        descriptor = folder.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(descriptor, f"{secrets.token_hex(16)}\n".encode())
            os.fsync(descriptor)  # else a crash of the machine could leave an empty one
            os.link(temporary, file, src_dir_fd=inside, dst_dir_fd=inside)
        finally:
            os.close(descriptor)
            os.unlink(temporary, dir_fd=inside)
