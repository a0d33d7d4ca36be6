from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.network import Host, Link, Network, can_make_networks
from testkit.network_namespaces import pids_in, sweep

from penstock.errors import OptionError
from penstock.testing.servers import ServerError

REASON = can_make_networks()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}")

TALK = [sys.executable, "-I", str(Path(__file__).with_name("talk.py"))]
RATE_BYTES_S = 200e6 / 8
SWITCHES = pytest.mark.parametrize("kind", ["bridge", "tap"])
KILLED = """
import signal, subprocess, sys
from testkit.network import Link, Network
network = Network({"a": Link()}, switch="tap").__enter__()
host = network.host("a")
child = host.popen(["sleep", "1000"], start_new_session=True)
print(host.namespace, child.pid, flush=True)
signal.pause()
"""


@contextlib.contextmanager
def network_of(kind: str, **more: bool) -> Iterator[Network]:
    """Three hosts at 200 Mbit/s; host a serves."""
    links = dict.fromkeys(("a", "b", "c"), Link(rate="200mbit", **more))
    with Network(links, switch=kind) as network:
        server = network.host("a").popen(
            [*TALK, "serve", network.host("a").address], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield network
        server.kill()
        server.communicate()


class Pings:
    """A connection that is kept open from one host to another."""

    def __init__(self, source: Host, target: Host) -> None:
        self.process = source.popen(
            [*TALK, "ping", target.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ping(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def fastest_s(self, count: int = 20) -> float:
        return min(float(self.ping()) for _ in range(count))

    def until_answered(self) -> None:
        while self.ping() == "silent":  # TCP asks again less and less often; the test has a guard
            pass

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def pull_bytes_s(source: Host, target: Host, num_bytes: int) -> float:
    return float(source.run([*TALK, "pull", target.address, str(num_bytes)]))


@SWITCHES
def test_a_link_has_its_rate_and_counts_its_bytes(kind: str) -> None:
    with network_of(kind) as network:
        a, b, c = network.hosts
        before = [host.counters() for host in network.hosts]
        rate = pull_bytes_s(b, a, 8_000_000)
        counted = [host.counters() - then for host, then in zip(network.hosts, before, strict=True)]
        assert 0.5 * RATE_BYTES_S < rate < 1.05 * RATE_BYTES_S
        for size_bytes in (counted[0].out_bytes, counted[1].in_bytes):
            assert 1.0 <= size_bytes / 8_000_000 < 1.1
        assert counted[2].in_bytes + counted[2].out_bytes < 80_000
        c.reshape(rate="20mbit")
        assert pull_bytes_s(c, a, 2_000_000) < 0.15 * RATE_BYTES_S
        with pytest.raises(OptionError, match="there is no host"):
            network.host("d")


@SWITCHES
def test_a_cut_link_is_silent_and_a_joined_one_speaks_again(kind: str) -> None:
    with network_of(kind) as network:
        a, b, c = network.hosts
        near, other = Pings(b, a), Pings(c, a)
        near.fastest_s(1)
        b.cut()
        assert near.ping() == "silent"
        other.fastest_s(1)  # the others do not notice
        b.join()
        near.until_answered()
        for pings in (near, other):
            pings.close()


def test_a_delay_passes_before_anything_arrives_and_loss_loses() -> None:
    with network_of("tap") as network:
        a, b, _ = network.hosts
        pings = Pings(b, a)
        near_s = pings.fastest_s()
        a.reshape(delay_s=0.005)
        b.reshape(delay_s=0.015)
        assert near_s < 0.040 <= pings.fastest_s(3) < 0.120
        b.reshape(loss=1.0)
        assert pings.ping() == "silent"
        b.reshape(loss=0.0, delay_s=0.0)
        pings.until_answered()
        pings.close()


def test_the_bridge_refuses_what_it_cannot_do() -> None:
    with pytest.raises(OptionError, match='switch="tap"'), Network({"a": Link(delay_s=0.1)}):
        pass
    assert not sweep()


def test_hosts_may_have_nothing_but_ipv6() -> None:
    with network_of("bridge", has_ipv4=False) as network:
        a, b, _ = network.hosts
        assert a.literal == "[fd99::1]"
        assert pull_bytes_s(b, a, 100_000) > 0
        assert "inet " not in b.run(["ip", "addr", "show", "eth0"])


def test_a_program_is_itself_and_shares_memory_with_its_host_only() -> None:
    with Network({"a": Link(), "b": Link()}) as network:
        a, b = network.hosts
        child = a.popen(["sleep", "1000"])
        assert a.pids() == [child.pid]
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert a.run(["hostname"]) == "a\n"
        assert a.run(["getent", "ahostsv4", "b"]).startswith(f"{b.address} ")
        with pytest.raises(ServerError, match="on a failed"):
            a.run(["ls", "/nowhere"])
        name = f"/dev/shm/{a.namespace}"
        a.run(["sh", "-c", f"pwd; echo here > {name}"], private_shm="1m", cwd="/tmp")
        assert a.run(["cat", name], private_shm="1m") == "here\n"
        assert "No such file" in b.run(["sh", "-c", f"cat {name} 2>&1 || true"], private_shm="1m")
        assert not Path(name).exists()
        a.popen(["sleep", "1000"], private_shm="1m")
        a.kill()
        assert a.pids() == []


def test_what_a_killed_run_left_is_swept_up() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    namespace, pid = owner.stdout.readline().split()
    with Network({"a": Link()}):
        assert int(pid) in pids_in(namespace), "one that still has its owner is left alone"
    owner.kill()
    owner.communicate()
    assert namespace in sweep()
    for folder in ("/run/netns", "/etc/netns"):
        assert not Path(folder, namespace).exists()
    assert not pids_in(namespace)
