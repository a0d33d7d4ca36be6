"""The addresses under which other nodes can reach this one.

The system lists them (getifaddrs): the addresses of all interfaces that are up, the fastest first,
or only those of the interfaces and networks that the settings choose (`settings`). A client tries
addresses in parallel, so one address too many costs little, but one too few can lose the peer.
Loopback and link-local addresses are given only if they were chosen or there are no others.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.peers.base import Address
from penstock.engine.peers.facts import ADDRESSES_MAX
from penstock.engine.peers.settings import peer_settings
from penstock.errors import OptionError

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_NET = Path("/sys/class/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceAddress:
    """One address of one interface that is up."""

    interface: str
    host: str
    """As others write it; a link-local address has its scope."""
    is_loopback: bool

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """Return the address without its scope."""
        return ipaddress.ip_address(self.host.partition("%")[0])

    @property
    def is_far_reaching(self) -> bool:
        """Return whether other hosts can use the address."""
        return not self.is_loopback and not self.ip.is_link_local


def addresses_here(port: int, interface: str | None = None) -> tuple[Address, ...]:
    """Return the addresses of a server that listens on a port of this host."""
    return tuple(Address(host=each.host, port=port) for each in chosen_addresses(interface))


def chosen_addresses(interface: str | None = None) -> list[InterfaceAddress]:
    """Return the addresses to give to others; None: those that the host's settings choose."""
    wish = peer_settings().interface if interface is None else interface
    there = interface_addresses()
    if wish:
        found = [each for part in wish.split(",") for each in _chosen(part.strip(), there)]
        return list(dict.fromkeys(found))[:ADDRESSES_MAX]
    usable = [each for each in there if each.is_far_reaching]
    usable = usable or [each for each in there if not each.is_loopback] or there
    return sorted(usable, key=_sort_key)[:ADDRESSES_MAX]


def _chosen(wish: str, there: list[InterfaceAddress]) -> list[InterfaceAddress]:
    found = [each for each in there if each.interface == wish]
    if not found:
        try:
            network = ipaddress.ip_network(wish, strict=False)
        except ValueError:
            network = None
        found = [each for each in there if network is not None and each.ip in network]
    if not found:
        names = ", ".join(f"{each.interface} ({each.host})" for each in there) or "nothing"
        raise OptionError(
            f"no interface or network {wish!r} with an address here; there are: {names}. Set "
            "PENSTOCK_INTERFACE, or interface in the table [peers] of penstock.toml, to one of "
            "them or to a network such as 10.0.0.0/8"
        )
    # Clients on another link cannot use a link-local address: give it only if there is no other.
    return [each for each in found if not each.ip.is_link_local] or found


_hardware: dict[str, bool] = {}
"""A cache by local address: whether a network device is behind it."""


def is_over_hardware(sock: socket.socket) -> bool:
    """Return whether the bytes of a connection go through a network device."""
    here, there = (_plain(name) for name in (sock.getsockname()[0], sock.getpeername()[0]))
    if here == there or ipaddress.ip_address(here).is_loopback:
        return False
    if here not in _hardware:
        if len(_hardware) >= 64:  # addresses may change for ever in a long run
            _hardware.clear()
        found = interface_addresses()
        names = [each.interface for each in found if each.host.partition("%")[0] == here]
        _hardware[here] = any(_has_device(_NET / name) for name in names)
    return _hardware[here]


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")


def _has_device(folder: Path, depth: int = 3) -> bool:
    """Return whether an interface has a device, perhaps below a bond or a VLAN."""
    if (folder / "device").exists():
        return True
    return depth > 0 and any(_has_device(lower, depth - 1) for lower in folder.glob("lower_*"))


def _sort_key(address: InterfaceAddress) -> tuple[bool, int, bool]:
    """Sort hardware before virtual interfaces, fast before slow ones, and IPv4 before IPv6."""
    folder = _NET / address.interface
    try:
        speed = int((folder / "speed").read_text())
    except (OSError, ValueError):
        speed = -1
    return not _has_device(folder), -speed, ":" in address.host


class _Sockaddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
)


def interface_addresses() -> list[InterfaceAddress]:
    """Return the addresses of all interfaces that are up and running."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "the interfaces cannot be listed")
    try:
        found, entry = [], first
        while entry:
            one = entry.contents
            if one.flags & _IFF_UP and one.flags & _IFF_RUNNING and one.address:
                name = one.name.decode()
                host = _host(one.address.contents, name)
                if host:
                    is_loopback = bool(one.flags & _IFF_LOOPBACK)
                    found.append(
                        InterfaceAddress(interface=name, host=host, is_loopback=is_loopback)
                    )
            entry = one.next
        return found
    finally:
        libc.freeifaddrs(first)


def _host(address: _Sockaddr, interface: str) -> str:
    data = bytes(address.data)
    if address.family == socket.AF_INET:  # port, address
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:  # port, flow, address, scope
        host = socket.inet_ntop(socket.AF_INET6, data[6:22])
        is_scoped = ipaddress.ip_address(host).is_link_local
        return f"{host}%{interface}" if is_scoped else host
    return ""
