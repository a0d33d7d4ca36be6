"""Asking again: exponential back-off with full jitter, inside a deadline.

Only errors that say `retryable` are asked again. The schedule is a pure function of a policy and a
random source; time is an argument. Jitter is *full* (anything from nothing to the bound), because
many ranks fail at the same moment and must not come back at the same moment.

The deadline bounds the wait of whoever asks, attempts that hang included. A first attempt is ended
in time by the store's own client. A later one has less time than the client knows of: it runs in a
thread of its own, which is left behind when the time is over. Calls that belong to one wait (the
copies of one fetch) share its deadline: see `waiting_since`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from penstock.clock import Clock, SystemClock
from penstock.errors import ExistsError, OptionError, StoreError, UnreachableError
from penstock.storage.base import Buffer, ObjectInfo, Store
from penstock.units import show_seconds

T = TypeVar("T")

_system = random.SystemRandom()
"""The default source: a seeded one would be copied by a fork, and all children would wait alike."""


class UniformRandom(Protocol):
    """A random source, such as `random.Random(seed)`."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number between a and b."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often to ask again. All bounds hold; the tightest one wins."""

    first_wait_s: float = 0.1
    """Bound of the first wait; each later bound is twice the one before."""
    wait_max_s: float = 10.0
    """No bound grows beyond this."""
    deadline_s: float = 120.0
    """A read that has not succeeded by then has failed."""
    attempts_max: int = 20
    """Attempts in all, the first one counted."""

    def __post_init__(self) -> None:
        if not 0 < self.first_wait_s <= self.wait_max_s:
            raise OptionError(
                f"first_wait_s must lie between 0 and wait_max_s ({self.wait_max_s:g}), "
                f"got {self.first_wait_s:g}"
            )
        if self.deadline_s < 0 or self.attempts_max < 1:
            raise OptionError(
                "deadline_s must be at least 0 and attempts_max at least 1, "
                f"got {self.deadline_s:g} and {self.attempts_max}"
            )


def waits(policy: RetryPolicy, source: UniformRandom) -> Iterator[float]:
    """Yield the seconds to wait before the second, third … attempt.

    >>> policy = RetryPolicy(first_wait_s=1, wait_max_s=4, attempts_max=5)
    >>> [round(wait, 2) for wait in waits(policy, random.Random(7))]
    [0.32, 0.3, 2.6, 0.29]
    """
    bound_s = policy.first_wait_s
    for _ in range(policy.attempts_max - 1):
        yield source.uniform(0.0, bound_s)
        bound_s = min(bound_s * 2, policy.wait_max_s)


Attempt = Callable[[int, int, BaseException | None], None]
"""Is told of each attempt: its number from 0, when it began (perf_counter_ns), how it failed."""


class _CallerWait(threading.local):
    """What callers of this thread have said about its reads."""

    since_s: float | None = None
    """Since when the caller waits; None: since it called."""
    seen: Attempt | None = None
    """Who is told of attempts."""


_wait = _CallerWait()


@contextmanager
def waiting_since(since_s: float) -> Iterator[None]:
    """Have the deadlines of all reads of this thread count from a moment of the system's clock."""
    before, _wait.since_s = _wait.since_s, since_s
    try:
        yield
    finally:
        _wait.since_s = before


@contextmanager
def attempts_seen(seen: Attempt) -> Iterator[None]:
    """Have somebody told of each attempt of this thread's reads, when it is over."""
    before, _wait.seen = _wait.seen, seen
    try:
        yield
    finally:
        _wait.seen = before


class RetryingStore:
    """A store that asks its inner store again."""

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        *,
        clock: Clock | None = None,
        source: UniformRandom | None = None,
    ) -> None:
        self.inner = store
        self.policy = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._source = source
        # Each thread counts in its own slot, so no count is lost and a fork meets no held lock.
        self._attempts: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Retrying({self.inner!r}, {self.policy!r})"

    @property
    def num_attempts(self) -> int:
        """Attempts so far, of all calls and threads."""
        return sum(list(self._attempts.values()))

    @property
    def num_attempts_here(self) -> int:
        """Attempts so far of the calling thread alone."""
        return self._attempts.get(threading.get_ident(), 0)

    @property
    def uri(self) -> str:
        """Return the inner store's root."""
        return self.inner.uri

    @property
    def source(self) -> str:
        """Return the inner store's word."""
        return self.inner.source

    @property
    def can_list(self) -> bool:
        """Return whether the inner store can."""
        return self.inner.can_list

    def _asked(self, call: Callable[[], T], key: str = "", *, is_read: bool = False) -> T:
        """Return what `call` returns in the end, or raise its last error with a count.

        `is_read` says that it may be left behind when the deadline has passed.
        """
        policy = self.policy
        started_s = now_s = self._clock.now_s()
        if _wait.since_s is not None:
            # However late it comes (another process was waited for before), it has a fair chance.
            most_s = (1 - _SHARE_MIN) * policy.deadline_s
            started_s = min(now_s, max(_wait.since_s, now_s - most_s))
        schedule = waits(policy, self._source or _system)
        thread = threading.get_ident()
        num_attempts = 0
        while True:
            num_attempts += 1
            self._attempts[thread] = self._attempts.get(thread, 0) + 1
            left_s = started_s + policy.deadline_s - self._clock.now_s()
            seen, begin_ns = _wait.seen, time.perf_counter_ns()
            try:
                if is_read and (num_attempts > 1 or left_s < _WHOLE * policy.deadline_s):
                    found = _within(left_s, call, self.uri + key)
                else:
                    found = call()
                if seen is not None:
                    seen(num_attempts - 1, begin_ns, None)
                return found
            except StoreError as error:
                if seen is not None:
                    seen(num_attempts - 1, begin_ns, error)
                if not error.retryable:
                    raise
                elapsed_s = self._clock.now_s() - started_s
                wait_s = next(schedule, None)
                if wait_s is not None:
                    wait_s = _wait_that_fits(wait_s, policy.deadline_s - elapsed_s, policy)
                if wait_s is None:
                    raise _given_up(error, num_attempts, elapsed_s) from error
            self._clock.sleep(wait_s)

    def info(self, key: str) -> ObjectInfo:
        """As the inner store."""
        return self._asked(lambda: self.inner.info(key), key, is_read=True)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As the inner store; after a failure it starts over and skips what it has given."""
        given: list[str] = []
        while True:
            listing = self._asked(lambda: _started(self.inner.list(prefix), given))
            try:
                for info in listing:
                    given[:] = [info.key]
                    yield info
            except StoreError as error:
                if not error.retryable:
                    raise
            else:
                return

    def read(self, key: str) -> memoryview:
        """As the inner store."""
        return self._asked(lambda: self.inner.read(key), key, is_read=True)

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """As the inner store."""
        return self._asked(
            lambda: self.inner.read_range(info, offset, length), info.key, is_read=True
        )

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """As the inner store."""
        # Not its `read_into`: an attempt that is left behind must not write into `target` later.
        target[:] = self.read_range(info, offset, target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """As the inner store.

        A put may succeed and its answer be lost. The next attempt then finds its own object, which
        must not count as another writer's: if the bytes there are ours, we won. Writers that must
        tell each other apart put something of their own, such as a run id, into the object.
        """
        has_failed = False

        def put() -> ObjectInfo:
            nonlocal has_failed
            try:
                return self.inner.write(key, data, only_if_absent=only_if_absent)
            except ExistsError:
                if not has_failed or self.inner.read(key) != memoryview(data):
                    raise
                return self.inner.info(key)
            except StoreError:
                has_failed = True
                raise

        return self._asked(put)

    def delete(self, key: str) -> None:
        """As the inner store."""
        self._asked(lambda: self.inner.delete(key))

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()


def _started(listing: Iterator[ObjectInfo], given: list[str]) -> Iterator[ObjectInfo]:
    """Return a listing past the keys already given, with its first page surely there."""
    for info in listing:
        if not given or info.key > given[-1]:
            return _with_first(info, listing)
    return iter(())


def _with_first(first: ObjectInfo, rest: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
    yield first
    yield from rest


_SHARE_MIN = 0.25
"""Share of the deadline that each call has, whatever went before."""
_WHOLE = 0.99
"""Share of the deadline that a first attempt needs for the client's own time-out to be in time."""


def _within(left_s: float, call: Callable[[], T], uri: str) -> T:
    """Return what `call` returns if it does so in time; else it goes on, and nobody waits for it.

    The client's time-outs end it, so the threads that are left behind are bounded.
    """
    outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((call(), None))
        except BaseException as error:  # It is raised by whoever waits.
            outcomes.put((None, error))

    threading.Thread(target=run, name="penstock-again", daemon=True).start()
    try:
        value, error = outcomes.get(timeout=max(0.0, left_s))
    except Empty:
        raise UnreachableError(
            f"{uri}: no answer before the deadline; check the network and the store, "
            "or raise deadline_s",
            uri=uri,
        ) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # Without an error there is one.


def _wait_that_fits(wait_s: float, left_s: float, policy: RetryPolicy) -> float | None:
    """Return how long to wait inside what is left of the deadline; None: another try is useless.

    A wait that is too long is cut, so that a store has all of the deadline to come back.
    """
    if wait_s <= left_s:
        return wait_s
    return left_s / 2 if left_s / 2 >= policy.first_wait_s else None


def _given_up(error: StoreError, num_attempts: int, elapsed_s: float) -> StoreError:
    attempts = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
    message = f"{error} (gave up after {attempts} in {show_seconds(elapsed_s)})"
    return type(error)(message, uri=error.uri)
