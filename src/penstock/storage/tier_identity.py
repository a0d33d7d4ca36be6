"""The name of a node as a keeper of bytes: 32 hex digits that lie where its bytes lie.

Homes are drawn by name. A name that comes with the disk keeps a node's units its own when it is
started again, under another address or with other ranks. Without a disk there is nothing to come
back to: the name then lies beside the first memory tier and goes with it, so that all ranks of a
node still have the same.

Two disks with one name, as after copying a machine, would be one home. Joining refuses that, and
removing the file named here makes a new one.
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
    """Return the name of a node with tiers of some kinds in some folders."""
    disks = [path.rpartition("/")[0] for kind, path in tiers if kind == "disk"]
    places = disks or [path for _, path in tiers]
    if not places:
        return secrets.token_hex(16)
    folder = Folder(path=places[0], descriptor=os.open(places[0], os.O_RDONLY | os.O_DIRECTORY))
    try:
        return _kept_in(folder)
    finally:
        folder.close()


def _kept_in(folder: Folder) -> str:
    """Return the name that lies in a folder, made by whoever is first."""
    for _ in range(_TRIES_MAX):
        found = read_identity(folder)
        if found is not None:
            return found
        _make(folder)
    # No room, or something of that name that we did not write. All ranks here must still agree.
    _log.warning(
        "%s/%s is not the name of a node and cannot be made, so this machine gets one until it "
        "starts anew; remove the file, or make some room there",
        folder.path,
        IDENTITY,
    )
    here = f"{os.uname().nodename} {_boot_id()} {folder.path}"
    return xxhash.xxh3_128_hexdigest(here.encode())


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_identity(folder: Folder) -> str | None:
    """Return the name that lies in a folder; None where there is none."""
    try:
        descriptor = folder.open_file(IDENTITY, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(descriptor, _READ_BYTES_MAX).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    return text if re.fullmatch("[0-9a-f]{32}", text) else None


def _make(folder: Folder) -> None:
    """Give a whole file its name, unless there is one: `link` is exclusive as O_EXCL is."""
    temporary, inside = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}", folder.descriptor
    with contextlib.suppress(OSError):
        descriptor = folder.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(descriptor, f"{secrets.token_hex(16)}\n".encode())
            os.fsync(descriptor)  # else a crash of the machine could leave an empty one
            os.link(temporary, IDENTITY, src_dir_fd=inside, dst_dir_fd=inside)
        finally:
            os.close(descriptor)
            os.unlink(temporary, dir_fd=inside)
