"""Flags: how ranks that share memory wait for each other.

Each rank has a line of its own with a counter that only it writes. `arrive` adds one, which says:
everything I wrote before is in memory, and I need nothing any more that I read before. `wait`
returns once the others' counters are as high. `sync` does both. There is no lock and no
coordinator, so a rank that dies leaves nothing locked.

Why this is correct. A counter is one aligned word of 64 bits, and CPython stores and loads it with
one instruction (`memoryview.cast("q")` copies a constant 8 bytes), so no other rank sees half of
it; if some build wrote it in halves, the upper one would be 0 for the first 2**32 steps anyway.
What remains is order: data before the counter on the side that arrives, the counter before the data
on the side that waits. x86 processors keep both by themselves, except for stores that bypass the
caches (memcpy of large blocks uses them, and fences afterwards). ARM processors keep neither. So
both sides call `_fence` between the data and the counter: it releases a lock of this process and
acquires it again. Unlocking is an atomic write with release order, locking one with acquire order;
release then acquire is ordered on ARM (RCsc: nothing before the release may be seen after it,
nothing after the acquire may come before it, and the two do not pass each other), and on x86 each
of them is a locked instruction, which is a full fence. The other way around, lock then unlock,
would fence nothing: accesses from both sides may move inside. It costs 0.1 microseconds.

A waiting rank first looks a few times, then yields (there may be fewer cores than ranks), then
sleeps, longer and longer up to half a millisecond. Every 20 ms it checks whether the rank it waits
for still lives: a process's end makes its pidfd readable, and unlike a pid, a pidfd never refers to
another process. A rank that fails says so in its line, and one that does not come within the
timeout of the process group (`timeouts`) counts as stuck.
"""

from __future__ import annotations

import os
import select
import threading
import time

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
    """The counters of the ranks of an arena, each in its own segment, at the same offset.

    Args:
        arena: where they are.
        offset: of the line in each segment.
        timeout_s: how long to wait for a rank that lives but does not come.
    """

    def __init__(self, arena: HostArena, offset: int, *, timeout_s: float) -> None:
        self._arena, self._timeout_s = arena, timeout_s
        self._lines = [arena.words(rank, offset, LINE_WORDS) for rank in range(arena.size)]
        self._mine = self._lines[arena.rank]
        self._others = [rank for rank in range(arena.size) if rank != arena.rank]
        self.count = self._mine[_COUNT]

    def sync(self) -> None:
        """Wait until all ranks are here; what they wrote before is there afterwards.

        Raises:
            PeerError: a rank is gone, has given up, or does not come.
        """
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Say that this rank has finished all its reads and writes so far."""
        self.count += 1
        _fence()  # data before the counter
        self._mine[_COUNT] = self.count

    def wait(self) -> None:
        """Wait until all other ranks have arrived as often as this one."""
        count = self.count
        for rank in self._others:
            if self._lines[rank][_COUNT] < count:
                self._wait_for(rank, count)
        _fence()  # the counters before the data

    def fail(self) -> None:
        """Say that this rank has failed, so that others stop waiting for it."""
        if self._mine[_STATE] == _OPEN:
            self._mine[_STATE] = _FAILED

    def close(self) -> None:
        """Say that this rank will not arrive any more, and release the arena's memory."""
        if self._mine[_STATE] == _OPEN:
            self._mine[_STATE] = _CLOSED
        for line in self._lines:
            line.release()

    def _wait_for(self, rank: int, count: int) -> None:
        line = self._lines[rank]
        for _ in range(_LOOKS):
            if line[_COUNT] >= count:
                return
        begin_s = check_s = time.monotonic()
        nap_s = _NAP_S_MIN
        while line[_COUNT] < count:
            now_s = time.monotonic()
            if now_s - check_s >= _CHECK_S or line[_STATE] != _OPEN:
                self._check(rank, count, now_s - begin_s)
                check_s = now_s
            if now_s - begin_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAP_S_MAX)

    def _check(self, rank: int, count: int, waited_s: float) -> None:
        """Raise if a rank will not come."""
        line = self._lines[rank]
        state, gone = line[_STATE], _is_readable(self._arena.pidfd(rank))
        # After the state: a rank that arrived and then ended has done its part.
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
