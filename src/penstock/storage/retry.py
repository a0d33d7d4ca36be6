"""Retries with exponential back-off and full jitter, inside a deadline.

Only errors that are `retryable` are retried. The schedule is a pure function of a policy and a
random source. Jitter is *full* (any wait from zero to the bound), because many ranks fail at the
same moment and must not retry at the same moment.

The deadline bounds the wait of the caller, including attempts that hang. The store's own client
ends a first attempt in time. A later attempt has less time left than the client's time-out, so it
runs in a thread of its own, which is abandoned at the deadline. Several calls that serve one wait
(the attempts of one fetch) share a deadline: see `waiting_since`.
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
from penstock.storage.wrapped import WrappedStore
from penstock.units import show_seconds

T = TypeVar("T")

_system = random.SystemRandom()
"""The default source. A fork would copy a seeded one, and all children would wait alike."""


class UniformRandom(Protocol):
    """A random source, such as `random.Random(seed)`."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number between a and b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often to retry. All bounds hold; the tightest one wins."""

    first_wait_s: float = 0.1
    """Bound of the first wait; each later bound is twice the one before."""
    wait_max_s: float = 10.0
    """No bound grows beyond this."""
    deadline_s: float = 120.0
    """A call that has not succeeded by then has failed."""
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
"""Called for each attempt: its number from 0, when it began (perf_counter_ns), and its error."""


class _CallerWait(threading.local):
    """What callers in this thread have set for its reads."""

    since_s: float | None = None
    """When the caller began to wait; None: with the call."""
    seen: Attempt | None = None
    """Called for each attempt."""


_wait = _CallerWait()


@contextmanager
def waiting_since(since_s: float) -> Iterator[None]:
    """Let the deadlines of all reads of this thread count from a moment of the system's clock."""
    before, _wait.since_s = _wait.since_s, since_s
    try:
        yield
    finally:
        _wait.since_s = before


@contextmanager
def attempts_seen(seen: Attempt) -> Iterator[None]:
    """Call `seen` after each attempt of this thread's reads."""
    before, _wait.seen = _wait.seen, seen
    try:
        yield
    finally:
        _wait.seen = before


class RetryingStore(WrappedStore):
    """A store that repeats failed calls of its inner store."""

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        *,
        clock: Clock | None = None,
        source: UniformRandom | None = None,
    ) -> None:
        super().__init__(store)
        self.policy = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._source = source
        # A slot per thread: no increments are lost, and there is no lock that a fork could copy.
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

    def _asked(self, call: Callable[[], T], key: str = "", *, is_read: bool = False) -> T:
        """Retry a call; return its result, or raise its last error with the number of attempts.

        `is_read` says that a call may be abandoned at the deadline; a write must not go on unseen.
        """
        policy = self.policy
        started_s = now_s = self._clock.now_s()
        if _wait.since_s is not None:
            # Even if another process was waited for first, this call gets a share of the deadline.
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
        """As the inner store; after a failure it lists again, and skips keys already given."""
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
        # Not the inner `read_into`: an abandoned attempt must not write into `target` later.
        target[:] = self.read_range(info, offset, target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """As the inner store.

        A put may succeed while its answer is lost. The next attempt then finds its own object: if
        the bytes are the same, the put has succeeded. Writers that must be told apart put
        something of their own into the object, such as a run's id.
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


def _started(listing: Iterator[ObjectInfo], given: list[str]) -> Iterator[ObjectInfo]:
    """Return a listing behind the keys already given; its first page has been read."""
    for info in listing:
        if not given or info.key > given[-1]:
            return _with_first(info, listing)
    return iter(())


def _with_first(first: ObjectInfo, rest: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
    yield first
    yield from rest


_SHARE_MIN = 0.25
"""The share of the deadline that each call gets at least."""
_WHOLE = 0.99
"""With less than this share of the deadline left, the client's own time-out comes too late."""


def _within(left_s: float, call: Callable[[], T], uri: str) -> T:
    """Return the result of `call`, or abandon its thread when the time is over.

    The client's time-out ends abandoned calls, so their number is bounded.
    """
    outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((call(), None))
        except BaseException as error:  # raised again in the waiting thread
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
    """Return how long to wait before the next attempt; None: too little of the deadline is left.

    A wait that is too long is cut, so that a store that comes back late is still tried once more.
    """
    if wait_s <= left_s:
        return wait_s
    return left_s / 2 if left_s / 2 >= policy.first_wait_s else None


def _given_up(error: StoreError, num_attempts: int, elapsed_s: float) -> StoreError:
    attempts = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
    message = f"{error} (gave up after {attempts} in {show_seconds(elapsed_s)})"
    return type(error)(message, uri=error.uri)
