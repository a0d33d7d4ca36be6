"""The switch that we provide: a process that moves frames between taps, in its own time.

It knows rate, delay, jitter and loss, and costs about 0.3 of a core at 1 Gbit/s: good up to a few
Gbit/s in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from testkit.network_link import Link
from testkit.network_namespaces import ip
from testkit.network_process import Program
from testkit.network_tap_process import Change, Plan


class TapSwitch:
    """A process that joins namespaces, in a namespace of its own."""

    def __init__(self, namespace: str, *, seed: int = 0) -> None:
        self._namespace = namespace
        self._seed = seed
        self._links: list[Link] = []
        self._cuts: list[bool] = []
        self._program = Program("network_tap_process")

    def plug(self, hosts: Sequence[str], links: Sequence[Link]) -> None:
        """Give each host's namespace an interface eth0."""
        self._links = list(links)
        self._cuts = [False] * len(hosts)
        self._program.start(self._namespace)
        self._program.ask(Plan(links=tuple(links), seed=self._seed))
        ip(
            self._namespace,
            [f"link set p{n} netns {host} name eth0" for n, host in enumerate(hosts)],
        )

    def reshape(self, number: int, link: Link) -> None:
        """Change a host's link, for what comes from now on."""
        self._links[number] = link
        self._tell(number)

    def cut(self, number: int) -> None:
        """Stop all frames to and from a host; its interface stays up."""
        self._cuts[number] = True
        self._tell(number)

    def join(self, number: int) -> None:
        """Undo a cut."""
        self._cuts[number] = False
        self._tell(number)

    def _tell(self, number: int) -> None:
        self._program.ask(
            Change(number=number, link=self._links[number], is_cut=self._cuts[number])
        )

    def stop(self) -> None:
        """End the process; the taps go with it."""
        self._program.stop()
