"""Many hosts on one machine: network namespaces, joined by a switch, each behind a link of its own.

    hosts = {"store": Link(rate="1gbit"), "a": Link(rate="10gbit"), "b": Link(rate="10gbit")}
    with Network(hosts) as network:
        server = network.host("store").popen(["python", "-m", "http.server", "80"])
        network.host("a").run(["curl", "http://store/"])
        network.host("b").cut()

There are two switches. `"bridge"` is the kernel's: links have rates and can be cut, at hardly any
cost. `"tap"` is a process of ours: delay, jitter and loss as well, up to a few Gbit/s in all.

Networks need root and iproute2 (`can_make_networks` returns what is missing). They live in
namespaces named after this process, which are removed when the block ends; the next run removes
what a killed run has left. The machine's own interfaces are never touched.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from penstock.errors import OptionError
from penstock.testing.servers import ServerError
from testkit import network_namespaces as namespaces
from testkit.network_bridge import Bridge
from testkit.network_host import Host, Switch
from testkit.network_link import Link, Traffic
from testkit.network_namespaces import SwitchKind, can_make_networks
from testkit.network_tap import TapSwitch
from testkit.network_tap_process import address_of

__all__ = ["Host", "Link", "Network", "Traffic", "can_make_networks"]

_HOSTS_MAX = 250
_MTU = 1500
_TCP_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"


class Network:
    """Hosts and the switch between them, from `with` to the end of its block."""

    def __init__(
        self,
        hosts: Mapping[str, Link],
        *,
        switch: SwitchKind = "bridge",
        seed: int = 0,
        tcp: str | None = None,
    ) -> None:
        """Name the hosts; `seed` draws losses and jitter.

        `tcp` is how senders find their rate, the machine's way by default. BBR needs tenths of a
        second after a pause: where turns are timed, "reno" keeps them apart.
        """
        if not 1 <= len(hosts) <= _HOSTS_MAX:
            raise OptionError(f"a network has 1 to {_HOSTS_MAX} hosts, got {len(hosts)}")
        for name in hosts:
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
                raise OptionError(f"{name!r} is no host's name; use letters a-z, digits and -")
        self._links = dict(hosts)
        self._kind = switch
        self._seed = seed
        self._tcp = tcp
        self._hosts: dict[str, Host] = {}
        self._switch: Switch | None = None
        self._namespaces: list[str] = []
        self._owner = 0

    def __enter__(self) -> Self:
        assert self._switch is None, "a network is entered once at a time"
        if (reason := can_make_networks(self._kind)) is not None:
            raise ServerError(reason)
        namespaces.sweep()
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        names = {host: self._namespace(host) for host in self._links}
        switch_name = self._namespace("switch")
        self._switch = (
            Bridge(switch_name)
            if self._kind == "bridge"
            else TapSwitch(switch_name, seed=self._seed)
        )
        for number, (name, link) in enumerate(self._links.items()):
            self._hosts[name] = Host(
                name=name,
                number=number,
                namespace=names[name],
                link=link,
                switch=self._switch,
            )
        self._switch.plug(list(names.values()), list(self._links.values()))
        names_of = [f"{a} {h.name}" for h in self.hosts for a in (h.ipv4, h.ipv6) if a]
        for host in self.hosts:
            namespaces.ip(host.namespace, self._addressing(host))
            namespaces.write_hosts(host.namespace, ["127.0.0.1 localhost", *names_of])
            if self._tcp is not None:
                host.run(["sh", "-c", f"echo {self._tcp} > {_TCP_FILE}"])

    def _namespace(self, host: str) -> str:
        name = namespaces.fresh_name(host)
        self._namespaces.append(name)
        namespaces.make(name)
        return name

    def _addressing(self, host: Host) -> list[str]:
        """Return the commands that give a host its addresses and those of the others.

        Neighbours are static entries: requests for them would be lost while a link is cut.
        """
        lines = [
            f"link set eth0 address {_hardware(host)} mtu {_MTU} txqueuelen 2000 up",
            f"addr add {host.ipv6}/64 dev eth0 nodad",
        ]
        if host.ipv4:
            lines.append(f"addr add {host.ipv4}/24 dev eth0")
        for other in self.hosts:
            if other is not host:
                lines += [
                    f"neigh replace {address} lladdr {_hardware(other)} dev eth0 nud permanent"
                    for address in (host.ipv4 and other.ipv4, other.ipv6)
                    if address
                ]
        return lines

    @property
    def hosts(self) -> list[Host]:
        """All hosts, in the order in which they were named."""
        return list(self._hosts.values())

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        if name not in self._hosts:
            raise OptionError(f"there is no host {name!r}; there are: {', '.join(self._links)}")
        return self._hosts[name]

    def stop(self) -> None:
        """End all programs on the hosts and remove everything."""
        if os.getpid() != self._owner:
            return  # A forked child that ends is not the end of the network.
        for host in self._hosts.values():
            host.close()
        if self._switch is not None:
            self._switch.stop()
            self._switch = None
        for name in self._namespaces:
            namespaces.remove(name)
        self._hosts, self._namespaces, self._owner = {}, [], 0
        atexit.unregister(self.stop)


def _hardware(host: Host) -> str:
    return address_of(host.number).hex(":")
