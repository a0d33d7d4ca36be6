"""Namespaces of a run: made, named after their owner, removed, and swept up after a killed run.

A name says whose it is: `penstock.PID.START.NUMBER.HOST`, where START is when that process began,
since numbers of processes come again. All interfaces live inside such namespaces, so removing them
removes everything, and nothing is ever seen among the machine's own interfaces.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from penstock.testing.servers import ServerError

SwitchKind = Literal["bridge", "tap"]

TUN = "/dev/net/tun"
_FOLDER = Path("/run/netns")
_FILES = Path("/etc/netns")
"""What lies in a folder of a namespace's name here stands in its /etc."""
_NAME = re.compile(r"penstock\.(\d+)\.(\d+)\.(\d+)\.([a-z0-9-]+)")
_SYSTEM_PATHS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
_COMMAND_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_POLL_S = 0.005
_numbers = itertools.count()


def can_make_networks(switch: SwitchKind = "tap") -> str | None:
    """Return why this machine cannot run a network of hosts, or None if it can.

    >>> reason = can_make_networks()
    >>> reason is None or isinstance(reason, str)
    True
    """
    return _reason(switch)


@functools.cache
def _reason(switch: SwitchKind) -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if program_of(program) is None:
            return f"{program} is not installed (tools/install_network.sh)"
    name = fresh_name("try")
    try:
        make(name)
        try:
            tc(name, ["qdisc add dev lo root tbf rate 1gbit burst 256kb latency 30ms"])
            if switch == "tap":
                os.close(os.open(TUN, os.O_RDWR))
        finally:
            remove(name)
    except (OSError, ServerError) as error:
        return f"this machine does not let us make networks: {error}"
    return None


def program_of(name: str) -> str | None:
    """Return the path of a system's program; those of root are not on every user's path."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_PATHS]))


def fresh_name(host: str) -> str:
    """Return a name that belongs to this process and was not used before."""
    return f"{_run_of(os.getpid())}.{next(_numbers)}.{host}"


def _run_of(pid: int) -> str:
    return f"penstock.{pid}.{_began(pid)}"


def _began(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def make(name: str) -> None:
    """Make a namespace with its loopback."""
    _run(["ip", "netns", "add", name])
    ip(name, ["link set lo up"])


def ip(name: str, commands: Sequence[str]) -> None:
    """Run commands of `ip` inside a namespace, in one go."""
    _run(["ip", "-n", name, "-batch", "-"], "\n".join(commands))


def tc(name: str, commands: Sequence[str]) -> None:
    """Run commands of `tc` inside a namespace, in one go."""
    _run(["tc", "-n", name, "-batch", "-"], "\n".join(commands))


def answer_of(*command: str) -> str:
    """Return what a command prints."""
    return _run(list(command))


def _run(command: list[str], text: str = "") -> str:
    program = program_of(command[0])
    assert program is not None, f"{command[0]} was looked for by can_make_networks"
    done = subprocess.run(
        [program, *command[1:]],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise ServerError(
            f"`{' '.join(command)}` failed ({done.returncode}): {done.stderr.strip()}"
        )
    return done.stdout


def pids_in(name: str) -> list[int]:
    """Return the processes that run in a namespace."""
    with contextlib.suppress(ServerError):
        return [int(pid) for pid in answer_of("ip", "netns", "pids", name).split()]
    return []


def wait_for_entry(name: str, child: subprocess.Popen[bytes]) -> None:
    """Return once a program that was started for a namespace is inside, or has ended."""
    room = (_FOLDER / name).stat().st_ino
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while child.poll() is None:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child.pid}/ns/net").stat().st_ino == room:
                return
        if time.monotonic() > deadline_s:
            raise ServerError(f"process {child.pid} has not entered {name} in {_END_TIMEOUT_S:g} s")
        time.sleep(_POLL_S / 5)


def kill_all(name: str, *, keep: Sequence[int] = ()) -> None:
    """Kill every process in a namespace but those to keep, and wait until none is left."""
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while pids := [pid for pid in pids_in(name) if pid not in keep]:
        if time.monotonic() > deadline_s:
            raise ServerError(f"{len(pids)} processes in {name} outlived SIGKILL: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def write_hosts(name: str, lines: Sequence[str]) -> None:
    """Let programs in a namespace find hosts by their names."""
    (_FILES / name).mkdir(parents=True)
    (_FILES / name / "hosts").write_text("\n".join([*lines, ""]))


def remove(name: str) -> None:
    """Remove a namespace with its processes; one that is gone already is fine."""
    kill_all(name)
    with contextlib.suppress(ServerError):
        _run(["ip", "netns", "del", name])
    shutil.rmtree(_FILES / name, ignore_errors=True)


def sweep() -> list[str]:
    """Remove what killed runs left behind, and return its names."""
    left = sorted({name for name in _names() if _is_ownerless(name)})
    for name in left:
        remove(name)
    return left


def _names() -> Iterator[str]:
    for folder in (_FOLDER, _FILES):
        if folder.is_dir():
            yield from (path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _is_ownerless(name: str) -> bool:
    match = _NAME.fullmatch(name)
    assert match is not None
    return _began(int(match[1])) != match[2]
