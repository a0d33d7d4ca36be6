"""Who is at work is waited for, who is stopped is not."""

import os
import signal
import time

from testkit.clock import VirtualClock

from penstock.storage.process_wait import IDLE_S_MAX, WAIT_S_MAX, ProcessWait


def waited_s(pid: int | None, each_s: float = 0.1) -> float:
    """Return how long a process is waited for, in virtual time."""
    clock = VirtualClock()
    patience = ProcessWait(clock)
    while not patience.is_over(pid):
        clock.sleep(each_s)
    return clock.now_s()


def forked(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def ended(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_stopped_process_is_waited_for_briefly() -> None:
    pid = forked(signal.pause)
    try:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert IDLE_S_MAX <= waited_s(pid) < IDLE_S_MAX + 0.5
    finally:
        ended(pid)


def test_a_process_that_sleeps_is_waited_for_briefly() -> None:
    pid = forked(signal.pause)
    try:
        while "S (sleeping)" not in open(f"/proc/{pid}/status").read():  # noqa: SIM115
            time.sleep(0.001)
        assert waited_s(pid) < IDLE_S_MAX + 0.5
    finally:
        ended(pid)


def test_a_process_that_computes_is_waited_for_longer() -> None:
    def compute() -> None:
        while True:
            pass

    pid = forked(compute)
    try:
        assert WAIT_S_MAX <= waited_s(pid) < WAIT_S_MAX + 0.5
    finally:
        ended(pid)


def test_one_process_after_another_is_waited_for() -> None:
    clock = VirtualClock()
    patience = ProcessWait(clock)
    for pid in range(2**22, 2**22 + 8):  # no process has such a number
        assert not patience.is_over(pid)
        clock.sleep(IDLE_S_MAX * 0.9)


def test_nobody_known_is_waited_for_briefly() -> None:
    assert waited_s(None) < IDLE_S_MAX + 0.5
