"""The switch that the kernel provides: a bridge, a pair of veth for each host, tbf at both ends.

It costs next to nothing, so it is the one for high rates. It knows rates only: kernels without
netem have no delay and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import OptionError
from testkit.network_link import QUEUE_S, Link
from testkit.network_namespaces import ip, tc

_BUCKET_BYTES = 256 * 1024
"""Segments of TCP travel in packets of up to 64 KiB: a bucket that holds few of them starves."""
_BUCKET_S = 0.001


class Bridge:
    """A bridge that joins namespaces, in a namespace of its own."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._hosts: list[str] = []

    def plug(self, hosts: Sequence[str], links: Sequence[Link]) -> None:
        """Give each host's namespace an interface eth0."""
        for link in links:
            _check(link)
        self._hosts = list(hosts)
        commands = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for number, host in enumerate(hosts):
            commands += [
                f"link add p{number} type veth peer name eth0 netns {host}",
                f"link set p{number} master br0 up",
            ]
        ip(self._namespace, commands)
        for number, link in enumerate(links):
            self.reshape(number, link)

    def reshape(self, number: int, link: Link) -> None:
        """Change a host's link."""
        _check(link)
        for namespace, device in (
            (self._hosts[number], "eth0"),
            (self._namespace, f"p{number}"),
        ):
            tc(namespace, [_qdisc(device, link)])

    def cut(self, number: int) -> None:
        """Stop all frames to and from a host; its interface stays up."""
        ip(self._namespace, [f"link set p{number} nomaster"])

    def join(self, number: int) -> None:
        """Undo a cut."""
        ip(self._namespace, [f"link set p{number} master br0"])

    def stop(self) -> None:
        """Do nothing: the bridge goes with its namespace."""


def _check(link: Link) -> None:
    if link.delay_s or link.jitter_s or link.loss:
        raise OptionError(f'{link} needs delay, jitter or loss: use switch="tap"')


def _qdisc(device: str, link: Link) -> str:
    if link.rate is None:
        return f"qdisc replace dev {device} root pfifo"
    bits_s = link.bytes_s * 8
    bucket_bytes = max(_BUCKET_BYTES, round(link.bytes_s * _BUCKET_S))
    return (
        f"qdisc replace dev {device} root tbf rate {bits_s:.0f}bit burst {bucket_bytes} "
        f"latency {QUEUE_S * 1000:.0f}ms"
    )
