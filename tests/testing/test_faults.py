from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.clock import VirtualClock

from penstock.errors import OptionError, StoreError, TruncatedError, UnavailableError
from penstock.storage import MemoryStore, Store
from penstock.testing.faults import CountingStore, FaultPlan, FaultyStore


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("faults")
    store.write("x", bytes(100))
    yield store
    store.clear()


def _outcome(store: Store, offset: int) -> str:
    try:
        data = store.read_range(store.info("x"), offset, 1)
    except StoreError as error:
        return type(error).__name__
    return "right" if data == b"\0" else "corrupt"


def test_the_same_plan_fails_the_same_reads_on_any_number_of_threads(memory: MemoryStore) -> None:
    plan = FaultPlan(seed=3, unavailable=0.2, truncated=0.2, corrupt=0.2)
    one = [_outcome(FaultyStore(memory, plan), offset) for offset in range(100)]
    store = FaultyStore(memory, plan)
    with ThreadPoolExecutor(8) as threads:
        many = list(threads.map(lambda offset: _outcome(store, offset), range(100)))
    assert one == many
    assert set(one) == {"right", "corrupt", "TruncatedError", "UnavailableError"}


@given(share=st.floats(0, 1), seed=st.integers(0, 100))
def test_about_the_planned_share_goes_wrong(share: float, seed: int) -> None:
    plan = FaultPlan(seed=seed, unavailable=share)
    faults = sum(plan.fault_of("x", offset, 0) != "" for offset in range(1000))
    assert abs(faults - 1000 * share) < 90  # more than five standard deviations


def test_each_kind_of_fault_does_what_it_says(memory: MemoryStore) -> None:
    with pytest.raises(UnavailableError):
        FaultyStore(memory, FaultPlan(unavailable=1)).read("x")
    with pytest.raises(TruncatedError, match="50 of 100"):
        FaultyStore(memory, FaultPlan(truncated=1)).read("x")
    target = bytearray(100)
    FaultyStore(memory, FaultPlan(corrupt=1)).read_into(memory.info("x"), 0, memoryview(target))
    assert target.count(0) == 99
    clock = VirtualClock()
    assert FaultyStore(memory, FaultPlan(slow=1, slow_s=3), clock=clock).read("x") == bytes(100)
    assert clock.now_s() == 3


def test_faults_are_counted_by_name(memory: MemoryStore) -> None:
    store = FaultyStore(memory, FaultPlan(corrupt=1))
    store.read("x")
    store.read("x")
    assert store.faults == {"corrupt": 2}


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(OptionError):
        FaultPlan(unavailable=0.7, slow=0.4)


def test_requests_and_bytes_are_counted(memory: MemoryStore) -> None:
    store = CountingStore(memory)
    store.read("x")
    store.read_range(store.inner.info("x"), 0, 10)
    store.read_into(store.inner.info("x"), 0, memoryview(bytearray(5)))
    store.write("y", b"123")
    store.info("y")
    list(store.list())
    store.delete("y")
    assert (store.read_bytes, store.written_bytes) == (115, 3)
    assert dict(store.requests) == {
        "read": 1, "read_range": 1, "read_into": 1, "write": 1, "info": 1, "list": 1, "delete": 1,
    }  # fmt: skip
