"""Flags: how ranks that share memory wait for each other.

Each rank has a line of its own with a counter that only it writes. `arrive` adds one and says by
that: all I wrote before is there, all I read before I need no more. `wait` returns once others'
counters are as far. `sync` is both. There is no lock and nobody decides, so nobody who dies can
take anything with him.

Why this is right. A counter is one aligned word of 64 bits, and CPython stores and loads it with
one instruction (`memoryview.cast("q")` copies a constant 8 bytes), so it is seen whole; if some
build did it in halves, the upper half would be 0 for the first 2**32 steps anyway. What is left is
order: data before the counter on the side that arrives, the counter before the data on the side
that waits. Processors of the x86 kind keep both by themselves, except for stores that go past the
caches (memcpy of large blocks uses them, and fences afterwards). Those of the ARM kind keep
neither. So both sides call `_fence` between the data and the counter: it gives back a lock of this
process and takes it again. Unlocking is an atomic write with release order, locking one with
acquire order; release then acquire is ordered on ARM (RCsc: nothing before the release may be seen
after it, nothing after the acquire may come before it, and the two do not pass each other), and on
x86 each of them is a locked instruction, which is a full fence. The other way around, lock then
unlock, would fence nothing: both neighbours may move inside. It costs 0.1 microseconds.

Waiting first looks a few times, then lets others run (there may be fewer cores than ranks), then
sleeps, longer and longer up to half a millisecond. Now and then it looks whether those it waits
for still live: a process's end makes its pidfd readable, so no process can be taken for another of
its number. A rank that gives up says so in its line, and one that is silent for as long as the
process group waits (`timeouts`) is given up as stuck.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence

from penstock.errors import PeerError
from penstock.step.comms.shm_memory import HostArena
from penstock.step.comms.timeouts import ADVICE

__all__ = ["Flags"]

LINE_WORDS = 16
"""Two cache lines: neighbours are fetched in pairs."""
_COUNT, _STATE = 0, 1
_OPEN, _FAILED, _CLOSED = 0, 1, 2
_LOOKS = 100
_YIELD_S = 200e-6
_NAP_S_MIN, _NAP_S_MAX = 20e-6, 500e-6
_CHECK_S = 20e-3

_fence_lock = threading.local()


def _fence() -> None:
    """Order all memory accesses before this call before all after it. See above."""
    try:
        lock = _fence_lock.lock
    except AttributeError:
        lock = _fence_lock.lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


class Flags:
    """The counters of some ranks of an arena, in one place that all of them have taken.

    Args:
        arena: where they are.
        offset: where the lines of all ranks begin; each rank uses its own in its own segment.
        ranks: which ranks of the arena take part, this one among them.
        timeout_s: how long to wait for a rank that lives but does not come.
    """

    def __init__(
        self, arena: HostArena, offset: int, ranks: Sequence[int], *, timeout_s: float
    ) -> None:
        self._arena, self._ranks, self._timeout_s = arena, tuple(ranks), timeout_s
        self._lines = [arena.words(rank, offset, LINE_WORDS) for rank in ranks]
        self._me = self._ranks.index(arena.rank)
        self._mine = self._lines[self._me]
        self._others = [i for i in range(len(self._ranks)) if i != self._me]
        self.count = self._mine[_COUNT]

    def sync(self) -> None:
        """Wait until all ranks are here; what they wrote before is there afterwards.

        Raises:
            PeerError: a rank is gone, has given up, or does not come.
        """
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Say that all that this rank has written and read so far is done."""
        self.count += 1
        _fence()
        self._mine[_COUNT] = self.count

    def wait(self) -> None:
        """Wait until all other ranks have arrived as often as this one."""
        count = self.count
        for index in self._others:
            if self._lines[index][_COUNT] < count:
                self._wait_for(index, count)
        _fence()

    def fail(self) -> None:
        """Say that this rank has given up: those who wait for it should not."""
        if self._mine[_STATE] == _OPEN:
            self._mine[_STATE] = _FAILED

    def close(self) -> None:
        """Say that this rank will not arrive any more, and let go of the arena's memory."""
        if self._mine[_STATE] == _OPEN:
            self._mine[_STATE] = _CLOSED
        for line in self._lines:
            line.release()

    def _wait_for(self, index: int, count: int) -> None:
        line = self._lines[index]
        for _ in range(_LOOKS):
            if line[_COUNT] >= count:
                return
        begin_s = check_s = time.monotonic()
        nap_s = _NAP_S_MIN
        while line[_COUNT] < count:
            now_s = time.monotonic()
            if now_s - check_s >= _CHECK_S or line[_STATE] != _OPEN:
                self._check(index, count, now_s - begin_s)
                check_s = now_s
            if now_s - begin_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAP_S_MAX)

    def _check(self, index: int, count: int, waited_s: float) -> None:
        """Raise if a rank will not come."""
        rank, line = self._ranks[index], self._lines[index]
        state, gone = line[_STATE], _is_readable(self._arena.pidfd(rank))
        if line[_COUNT] >= count:
            return
        where = f"rank {self._arena.rank} waits for it at step {count}, it came to {line[_COUNT]}"
        who = f"rank {rank}"
        if state == _FAILED:
            raise PeerError(f"{who} has given up; {where}: its own error says why", peer=who)
        if state == _CLOSED:
            raise PeerError(f"{who} has closed its shared memory; {where}", peer=who)
        if gone:
            raise PeerError(f"{who} is gone (its process ended); {where}", peer=who)
        if waited_s > self._timeout_s:
            raise PeerError(
                f"{who} lives but does not come; {where} after {self._timeout_s:g} s, the time-out "
                f"of the group: either it is slow (set a longer one by {ADVICE}) or the ranks do "
                "not call the same operations",
                peer=who,
                kind="stuck",
            )


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
