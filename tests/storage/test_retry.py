from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.clock import VirtualClock

from penstock.errors import (
    ExistsError,
    NotFoundError,
    OptionError,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnreachableError,
)
from penstock.storage import MemoryStore, ObjectInfo, RetryingStore, RetryPolicy, Store
from penstock.storage.base import Buffer
from penstock.storage.retry import waits
from penstock.testing.conformance import StoreConformance
from penstock.testing.faults import FaultPlan, FaultyStore, WrappedStore


class TestRetryingStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        inner = MemoryStore("retrying")
        yield RetryingStore(inner)
        inner.clear()


class _Failing(WrappedStore):
    """Fails the first calls, then works. `lose` lets a put succeed and loses its answer."""

    def __init__(self, store: Store, errors: list[StoreError], *, lose: bool = False) -> None:
        super().__init__(store)
        self._errors = errors
        self._lose = lose

    def read(self, key: str) -> memoryview:
        if self._errors:
            raise self._errors.pop(0)
        return super().read(key)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        if self._errors:
            if self._lose:
                super().write(key, data, only_if_absent=only_if_absent)
            raise self._errors.pop(0)
        return super().write(key, data, only_if_absent=only_if_absent)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(prefix)):
            if number == 2 and self._errors:
                raise self._errors.pop(0)
            yield info


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("retry")
    store.write("x", b"right")
    yield store
    store.clear()


def _retrying(store: Store, clock: VirtualClock, **policy: float) -> RetryingStore:
    return RetryingStore(store, RetryPolicy(**policy), clock=clock, source=random.Random(7))  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 1000),
    first=st.floats(0.01, 2),
    factor=st.floats(1, 100),
    attempts=st.integers(1, 30),
)
def test_waits_are_jittered_below_doubling_bounds(
    seed: int, first: float, factor: float, attempts: int
) -> None:
    policy = RetryPolicy(first_wait_s=first, wait_max_s=first * factor, attempts_max=attempts)
    found = list(waits(policy, random.Random(seed)))
    assert len(found) == attempts - 1
    for number, wait_s in enumerate(found):
        assert 0 <= wait_s <= min(first * 2**number, first * factor)
    assert found == list(waits(policy, random.Random(seed)))


@pytest.mark.parametrize("kind", [UnavailableError, TruncatedError, UnreachableError])
def test_what_is_retryable_is_asked_again(memory: MemoryStore, kind: type[StoreError]) -> None:
    clock = VirtualClock()
    store = _retrying(_Failing(memory, [kind("no"), kind("no")]), clock)
    assert store.read("x") == b"right"
    assert store.num_attempts == 3
    assert 0 < clock.now_s() <= 0.1 + 0.2


def test_what_is_not_retryable_is_raised_at_once(memory: MemoryStore) -> None:
    clock = VirtualClock()
    store = _retrying(memory, clock)
    with pytest.raises(NotFoundError):
        store.read("missing")
    assert (store.num_attempts, clock.now_s()) == (1, 0.0)


def test_attempts_are_bounded_and_counted_in_the_message(memory: MemoryStore) -> None:
    failing = _Failing(memory, [UnavailableError("503", uri="u")] * 100)
    with pytest.raises(
        UnavailableError, match=r"503 \(gave up after 4 attempts in .*s\)"
    ) as caught:
        _retrying(failing, VirtualClock(), attempts_max=4).read("x")
    assert caught.value.uri == "u"


def test_no_attempt_starts_after_the_deadline(memory: MemoryStore) -> None:
    clock = VirtualClock()
    failing = _Failing(memory, [UnavailableError("503")] * 10_000)
    with pytest.raises(UnavailableError, match="gave up"):
        _retrying(failing, clock, deadline_s=30, attempts_max=10_000).read("x")
    assert 15 < clock.now_s() <= 30


def test_a_put_whose_answer_was_lost_finds_its_own_object(memory: MemoryStore) -> None:
    failing = _Failing(memory, [UnreachableError("reset")], lose=True)
    info = _retrying(failing, VirtualClock()).write("new", b"mine", only_if_absent=True)
    assert info.size_bytes == 4
    assert memory.read("new") == b"mine"


def test_a_put_after_a_failure_still_loses_to_another_writer(memory: MemoryStore) -> None:
    failing = _Failing(memory, [UnavailableError("503")])
    with pytest.raises(ExistsError):
        _retrying(failing, VirtualClock()).write("x", b"other", only_if_absent=True)
    assert memory.read("x") == b"right"


def test_a_put_that_finds_the_same_bytes_without_failure_has_lost(memory: MemoryStore) -> None:
    with pytest.raises(ExistsError):
        _retrying(memory, VirtualClock()).write("x", b"right", only_if_absent=True)


def test_a_listing_goes_on_where_it_broke(memory: MemoryStore) -> None:
    for name in "abcdef":
        memory.write(name, b"")
    failing = _Failing(memory, [UnavailableError("503"), UnavailableError("503")])
    keys = [info.key for info in _retrying(failing, VirtualClock()).list()]
    assert keys == [*"abcdef", "x"]


@given(seed=st.integers(0, 50))
def test_faults_below_one_are_survived(seed: int) -> None:
    memory = MemoryStore("survive")
    memory.write("x", bytes(range(256)))
    clock = VirtualClock()
    plan = FaultPlan(seed=seed, unavailable=0.3, truncated=0.2, slow=0.1)
    faulty = FaultyStore(memory, plan, clock=clock)
    store = _retrying(faulty, clock, attempts_max=100, deadline_s=1000)
    for offset in range(0, 256, 16):
        assert store.read_range(store.info("x"), offset, 16) == bytes(range(offset, offset + 16))


@pytest.mark.parametrize(
    "wrong", [{"first_wait_s": 0}, {"first_wait_s": 20}, {"deadline_s": -1}, {"attempts_max": 0}]
)
def test_a_policy_refuses_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
