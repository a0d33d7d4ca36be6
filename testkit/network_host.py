"""A host of a network: where programs run, and the cable that can be cut.

Hosts share the machine's files, processes and cores; what they have of their own is the network,
the host's name and, if asked for, the memory under /dev/shm.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import OptionError
from penstock.testing.servers import ServerError
from penstock.units import bytes_of
from testkit import network_namespaces as namespaces
from testkit.network_link import Link, Traffic
from testkit.network_process import dies_with_us, inside

_HELD = 'mount -t tmpfs -o "size=$0" penstock /dev/shm && echo ready && exec cat'
"""Keeps a mount namespace of its own for as long as its input is open."""
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class Switch(Protocol):
    """Joins hosts, which have numbers."""

    def plug(self, hosts: Sequence[str], links: Sequence[Link]) -> None:
        """Give each host's namespace an interface eth0."""

    def reshape(self, number: int, link: Link) -> None:
        """Change a host's link."""

    def cut(self, number: int) -> None:
        """Let nothing through."""

    def join(self, number: int) -> None:
        """Undo a cut."""

    def stop(self) -> None:
        """End what was started."""


class Host:
    """A network namespace with one interface, eth0."""

    def __init__(
        self, *, name: str, number: int, namespace: str, link: Link, switch: Switch
    ) -> None:
        self.name = name
        self.number = number
        self.namespace = namespace
        self.link = link
        self._switch = switch
        self.ipv4 = f"10.99.0.{number + 1}" if link.has_ipv4 else ""
        self.ipv6 = f"fd99::{number + 1:x}"
        self._room: subprocess.Popen[bytes] | None = None
        self._room_bytes = 0

    @property
    def address(self) -> str:
        """The address to use: of IPv4 where the host has one."""
        return self.ipv4 or self.ipv6

    @property
    def literal(self) -> str:
        """The same as it stands in a url or before a port: an IPv6 address in brackets."""
        return self.ipv4 or f"[{self.ipv6}]"

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        private_shm: str | None = None,
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on this host; its pid is the program's own.

        It ends with the thread that started it, if not before. `env` is added to this process's
        environment. With `private_shm` (a size) all programs of this host that ask for it share
        a /dev/shm that no other host sees.
        """
        # Entering another mount namespace leaves the working folder behind.
        where = Path(cwd or Path.cwd()).resolve()
        prefix = inside(self.namespace) if private_shm is None else self._room_prefix(private_shm)
        child = subprocess.Popen(
            [*dies_with_us(), *prefix, *self._named(), "env", f"--chdir={where}", *command],
            env=_environment() | dict(env or {}),
            **more,
        )
        # From here on `pids` knows it, and `kill` cannot miss it.
        namespaces.wait_for_entry(self.namespace, child)
        return child

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = 60.0,
        **more: Any,
    ) -> str:
        """Run a program to its end and return what it printed; raise if it failed."""
        child = self.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
        )
        try:
            said, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            child.kill()
            said, _ = child.communicate()
            raise ServerError(
                f"{command[0]} on {self.name} did not end within {timeout_s:g} s:\n{said[-2000:]}"
            ) from error
        if child.returncode != 0:
            raise ServerError(
                f"{command[0]} on {self.name} failed ({child.returncode}):\n{said[-2000:]}"
            )
        return str(said)

    def _named(self) -> list[str]:
        """Return the words that give a program the host's name for its machine's."""
        return [
            namespaces.program_of("unshare") or "unshare",
            "--uts",
            "sh",
            "-c",
            _NAMED,
            self.name,
        ]

    def _room_prefix(self, size: str) -> list[str]:
        if self._room is None:
            self._open_room(bytes_of(size))
        if self._room_bytes != bytes_of(size):
            raise OptionError(
                f"/dev/shm of {self.name} has {self._room_bytes} bytes already, not "
                f"{bytes_of(size)}; ask for the same size each time"
            )
        assert self._room is not None
        nsenter = namespaces.program_of("nsenter") or "nsenter"
        return [nsenter, f"--mount=/proc/{self._room.pid}/ns/mnt", *inside(self.namespace)]

    def _open_room(self, size_bytes: int) -> None:
        room = subprocess.Popen(
            [*dies_with_us(), *inside(self.namespace), "sh", "-c", _HELD, str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._room, self._room_bytes = room, size_bytes
        assert room.stdout is not None
        if room.stdout.readline() != b"ready\n":
            raise ServerError(f"{self.name} got no /dev/shm of its own; the program ended early")

    def pids(self) -> list[int]:
        """Return the programs that run on this host, and their children."""
        room = self._room.pid if self._room is not None else -1
        return [pid for pid in namespaces.pids_in(self.namespace) if pid != room]

    def kill(self) -> None:
        """Kill all programs of this host at once; its /dev/shm goes too, as in a loss of power."""
        namespaces.kill_all(self.namespace)
        self.close()

    def kill_programs(self) -> None:
        """Kill all programs of this host; its /dev/shm stays, as when only the job has died."""
        keep = [] if self._room is None else [self._room.pid]
        namespaces.kill_all(self.namespace, keep=keep)

    def close(self) -> None:
        """Give up the private /dev/shm."""
        if self._room is not None:
            room, self._room = self._room, None
            room.kill()
            room.communicate()

    def cut(self) -> None:
        """Cut the cable: no frame passes, and no program is told."""
        self._switch.cut(self.number)

    def join(self) -> None:
        """Plug the cable in again."""
        self._switch.join(self.number)

    def reshape(
        self, *, rate: str | None = None, delay_s: float | None = None, loss: float | None = None
    ) -> None:
        """Change the link while it is used; what is not named stays."""
        link = self.link.changed(rate=rate, delay_s=delay_s, loss=loss)
        self._switch.reshape(self.number, link)
        self.link = link

    def counters(self) -> Traffic:
        """Return what the interface has counted so far."""
        said = namespaces.answer_of("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        counts = json.loads(said)[0]["stats64"]
        return Traffic(in_bytes=counts["rx"]["bytes"], out_bytes=counts["tx"]["bytes"])


def _environment() -> dict[str, str]:
    """Return our environment without proxies: no host reaches them."""
    return {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
