"""The options of a service: from flags, else from the table [node] of penstock.toml.

    [node]
    memory = "64GB"                # or "/run/penstock/memory:64GB": another tmpfs than /dev/shm
    disk = ["/nvme:2TB"]
    listen = ":7410"               # on the interfaces of [peers]; "0.0.0.0:7410" means all
    share = "user"
    limit-dataset = "500GB"

Names are those of the flags. The file is $PENSTOCK_CONFIG, else ./penstock.toml, else
/etc/penstock/penstock.toml; a flag wins over it. Interfaces and TLS are in [peers] of the same file
(`peers.settings`).
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.node.folders import FolderOwner, owner_named
from penstock.engine.node.grants import GrantLimits
from penstock.engine.peers.addresses import addresses_here
from penstock.engine.peers.base import Address
from penstock.engine.peers.local import SYSTEM_SOCKET
from penstock.engine.peers.settings import config_table
from penstock.errors import OptionError
from penstock.storage.tier_sizes import Wish, disk_of, memory_of
from penstock.units import bytes_of

LISTEN = ":7410"
HTTP = "127.0.0.1:7411"
SHARES = ("user", "group", "all")
NAMES = (
    "memory", "disk", "listen", "socket", "http", "share", "limit-dataset", "limit-user",
)  # fmt: skip
_SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of a service."""

    wishes: tuple[Wish, ...]
    """The tiers to offer, the fastest first."""
    listen: tuple[Address, ...]
    """The addresses of the peer server."""
    socket: str
    http: Address | None
    share: str = "user"
    limits: GrantLimits = field(default_factory=GrantLimits)

    def owner_of(self, user: int, group: int) -> FolderOwner:
        """Return the owner of a process's data sets; refuse a user that is not served."""
        if os.geteuid() not in (0, user):
            raise OptionError(
                f"this node service runs as user {os.geteuid()} and keeps data of that user only, "
                f"and you are user {user}; start a `penstock node` of your own, or have root run "
                "one for all"
            )
        if self.share == "all":
            return owner_named("all")
        return owner_named(f"g{group}" if self.share == "group" else f"u{user}")


def options_of(given: Mapping[str, Any], config: Mapping[str, Any]) -> NodeOptions:
    """Return the options; flags in `given` win over those of the file."""
    said = {**config, **{name: value for name, value in given.items() if value not in (None, [])}}
    memory, disks = said.get("memory"), said.get("disk", [])
    wishes: list[Wish] = [] if memory is None else [memory_of(str(memory))]
    wishes += [disk_of(str(text)) for text in ([disks] if isinstance(disks, str) else disks)]
    if not wishes:
        raise OptionError(
            "a node service needs something to keep data in; give --memory 64GB, or "
            "--disk /nvme:2TB, or both"
        )
    http = str(said.get("http", HTTP))
    return NodeOptions(
        wishes=tuple(wishes),
        listen=_listen(str(said.get("listen", LISTEN))),
        socket=_socket(str(said.get("socket", ""))),
        http=None if http == "none" else address_of(http, "http"),
        share=_share(str(said.get("share", "user"))),
        limits=GrantLimits(
            dataset_bytes=_limit(said, "limit-dataset"), owner_bytes=_limit(said, "limit-user")
        ),
    )


def config_here(environment: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], str]:
    """Return the table [node] of the first penstock.toml there is, and its path."""
    table, path = config_table("node", environment)
    for name in table:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(NAMES)}"
            raise OptionError(f"{path}: [node] has no option {name!r}; {hint}")
    return table, path


def address_of(text: str, what: str) -> Address:
    """Return an address from text.

    >>> address_of("[::]:7410", "listen"), address_of(":80", "http").host
    (Address(host='::', port=7410), '0.0.0.0')
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "0.0.0.0"
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return Address(host=host, port=int(port if colon else text))
    except ValueError:
        raise OptionError(
            f"--{what} {text!r} is not an address; write for example 0.0.0.0:7410 or [::]:7410"
        ) from None


def _listen(text: str) -> tuple[Address, ...]:
    """Return the addresses of the peer server; a port alone means those that members are told."""
    address = address_of(text, "listen")
    has_host = bool(text.rpartition(":")[0])
    return (address,) if has_host else addresses_here(address.port)


def _share(text: str) -> str:
    if text not in SHARES:
        raise OptionError(f"--share {text!r} is none of {', '.join(SHARES)}")
    if text != "user" and os.geteuid() != 0:
        raise OptionError(
            f"--share {text} needs a service that runs as root: user {os.geteuid()} cannot make "
            "folders for others"
        )
    return text


def _limit(said: Mapping[str, Any], name: str) -> int | None:
    return bytes_of(said[name]) if name in said else None


def _socket(text: str) -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not text and os.geteuid() == 0:
        text = SYSTEM_SOCKET
    if not text and runtime:
        text = f"{runtime}/penstock/node.sock"
    if not text:
        raise OptionError("XDG_RUNTIME_DIR is not set; say with --socket where jobs find this node")
    path = str(Path(text).expanduser().absolute())
    if len(path.encode()) > _SOCKET_PATH_BYTES_MAX:
        raise OptionError(
            f"the socket's path has {len(path.encode())} bytes, and the system takes "
            f"{_SOCKET_PATH_BYTES_MAX}: {path}; give a shorter one with --socket"
        )
    return path
