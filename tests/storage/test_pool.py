from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError, RangeError
from penstock.storage import MemoryStore, ReadPool, ReadRequest
from penstock.testing.conformance import some_bytes
from penstock.testing.faults import CountingStore

_DATA = some_bytes(100_000)


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("pool")
    store.write("x", _DATA)
    store.write("y", _DATA[::-1])
    yield store
    store.clear()


@given(
    st.lists(
        st.tuples(st.sampled_from("xy"), st.integers(0, 90_000), st.integers(0, 9000)), max_size=40
    )
)
def test_every_target_gets_its_own_bytes(wanted: list[tuple[str, int, int]]) -> None:
    store = MemoryStore("pool property")
    store.write("x", _DATA)
    store.write("y", _DATA[::-1])
    targets = [bytearray(length) for _, _, length in wanted]
    requests = [
        ReadRequest(info=store.info(key), offset=offset, target=memoryview(target))
        for (key, offset, _), target in zip(wanted, targets, strict=True)
    ]
    with ReadPool(3) as pool:
        pool.read_many(store, requests)
    for (key, offset, length), target in zip(wanted, targets, strict=True):
        assert bytes(store.read_range(store.info(key), offset, length)) == target


def test_near_ranges_are_asked_for_once(memory: MemoryStore) -> None:
    counting = CountingStore(memory)
    targets = [bytearray(100) for _ in range(50)]
    with ReadPool(4) as pool:
        pool.read_many(
            counting,
            [
                ReadRequest(info=memory.info("x"), offset=number * 1000, target=memoryview(target))
                for number, target in enumerate(targets)
            ],
        )
    assert counting.requests == {"read_range": 1}
    assert all(
        target == _DATA[number * 1000 : number * 1000 + 100]
        for number, target in enumerate(targets)
    )


def test_results_come_as_they_are_ready() -> None:
    release = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            release.wait()
        return number

    with ReadPool(2) as pool:
        results = pool.map_unordered(work, range(5))
        first = [next(results) for _ in range(4)]
        release.set()
        assert sorted(first) == [1, 2, 3, 4]
        assert list(results) == [0]


def test_the_first_error_reaches_the_caller_with_its_traceback(memory: MemoryStore) -> None:
    started: list[int] = []

    def _breaks(number: int) -> None:
        started.append(number)
        memory.read_range(memory.info("x"), 99_999, 2)

    with ReadPool(2) as pool, pytest.raises(RangeError) as caught:
        list(pool.map_unordered(_breaks, range(1000)))
    assert "_breaks" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert len(started) < 20


def test_no_thread_outlives_the_block(memory: MemoryStore) -> None:
    before = threading.active_count()
    with ReadPool(8) as pool:
        list(pool.map_unordered(lambda number: number, range(100)))
    assert threading.active_count() == before


def test_items_are_taken_a_bounded_number_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    with ReadPool(2) as pool:
        results = pool.map_unordered(lambda number: number, items())
        next(results)
        assert len(taken) <= 4
        results.close()  # type: ignore[attr-defined]


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(OptionError):
        ReadPool(0)
