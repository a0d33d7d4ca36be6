"""Stores: what is read is counted, comes at random, and shows the latency that is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.dataset.open import look_up, write_index
from penstock.errors import NotFoundError, OptionError, UnavailableError
from penstock.simulate.probe import Target
from penstock.simulate.probe.stores import measure_store
from penstock.simulate.probe.target import _of_objects
from penstock.storage import MemoryStore, ObjectInfo, open_store
from penstock.testing.faults import CountingStore, FaultPlan, FaultyStore

from .conftest import TINY

SLOW_S = 0.01


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("probe")
    for i in range(4):
        store.write(f"x-{i}", bytes([i]) * 1_000_000)
    yield store
    store.clear()


def target_in(store: Any) -> Target:
    return Target(store=store, objects=list(store.list()))


def test_the_latency_is_at_least_the_one_that_is_there(memory: MemoryStore) -> None:
    slow = FaultyStore(memory, FaultPlan(slow=1.0, slow_s=SLOW_S))
    facts = measure_store(target_in(slow), TINY)
    assert SLOW_S <= facts.model.latency_s <= facts.model.latency_p99_s
    # Each request takes so long at least, so that so many at once bring at most so much.
    curve = facts.model.throughput
    for count, bytes_s in zip(curve.counts, curve.bytes_s, strict=True):
        assert bytes_s <= count * (128 << 10) / SLOW_S
    assert curve.at(4) > curve.at(1)
    assert facts.in_flight in curve.counts


def test_every_byte_and_every_request_is_counted(memory: MemoryStore) -> None:
    counting = CountingStore(memory)
    facts = measure_store(target_in(counting), TINY)
    assert facts.read_bytes == counting.read_bytes
    assert facts.num_requests == counting.requests["read_into"]
    assert sum(counting.requests.values()) == facts.num_requests + 1  # and one listing
    assert facts.read_bytes <= 2 * TINY.store_bytes_max
    assert "read again, caches may have helped" in facts.note


def test_errors_of_the_store_come_through(memory: MemoryStore) -> None:
    with pytest.raises(UnavailableError, match="503, as planned"):
        measure_store(target_in(FaultyStore(memory, FaultPlan(unavailable=1.0))), TINY)


def test_an_empty_store_is_refused() -> None:
    store = MemoryStore("probe-empty")
    store.write("x", b"")
    with pytest.raises(OptionError, match="holds no bytes"):
        measure_store(target_in(store), TINY)
    store.clear()


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 1 << 20), max_size=8), seed=st.integers(0, 99))
def test_ranges_lie_inside_their_objects_and_differ(sizes: list[int], seed: int) -> None:
    objects = [ObjectInfo(key=str(i), size_bytes=size) for i, size in enumerate(sizes)]
    ranges = _of_objects(objects, np.random.default_rng(seed))
    assert len(set(ranges)) == len(ranges)
    assert bool(ranges) == any(sizes)
    for info, offset, length in ranges:
        assert 0 < length <= 128 << 10
        assert 0 <= offset <= offset + length <= sizes[int(info.key)]


def test_ranges_of_an_index_are_samples_or_runs_of_small_ones(shards: Path) -> None:
    dataset = penstock.open(shards)
    draws = Target.of(shards).draws(seed=1)
    assert draws.num_ranges == len(dataset)
    sizes = {path.name: path.stat().st_size for path in shards.glob("*.tar")}
    ranges = draws.take(len(dataset))
    lengths = {length for _, _, length in ranges}
    assert max(lengths) > 150_000  # a large sample, alone
    assert 128 << 10 in lengths  # a small one, with those behind it
    assert all(offset + length <= sizes[info.key] for info, offset, length in ranges)
    assert (draws.num_again, draws.take(1)) == (0, ranges[:1])
    assert draws.num_again == 1
    draws.put_back(3)
    assert (draws.take(2), draws.num_again) == (ranges[-2:], 0)


def test_nothing_is_indexed_for_a_probe(shards: Path) -> None:
    target = Target.of(shards)
    assert target.dataset is None
    assert sorted(info.key for info in target.objects) == ["x-0.tar", "x-1.tar"]
    assert sorted(path.name for path in shards.iterdir()) == ["x-0.tar", "x-1.tar"]
    assert {r.length for r in target.draws(seed=1).take(4)} <= {*range(1, (128 << 10) + 1)}


def test_an_index_may_be_named_itself(shards: Path) -> None:
    write_index(look_up(shards))
    target = Target.of(shards / ".penstock" / "all" / "v000001.json")
    assert target.dataset is not None
    assert len(target.dataset) == 80


def test_a_folder_is_a_store_too(shards: Path) -> None:
    facts = measure_store(Target.of(shards), TINY)
    assert facts.model.throughput.counts[0] == 1
    assert facts.note.startswith("folder, ")


def test_a_real_object_store(s3: Any, shards: Path) -> None:
    store = open_store(f"{s3.uri}set/", s3.options)
    for path in sorted(shards.glob("*.tar")):
        store.write(path.name, path.read_bytes())
    plain = Target.of(f"{s3.uri}set/", store=s3.options)
    assert plain.dataset is None
    penstock.open(f"{s3.uri}set/", store=s3.options)
    indexed = Target.of(f"{s3.uri}set/", store=s3.options)
    assert indexed.dataset is not None
    counting = CountingStore(indexed.store)
    facts = measure_store(Target(store=counting, dataset=indexed.dataset), TINY)
    assert facts.read_bytes == counting.read_bytes
    assert 0 < facts.model.latency_s <= facts.model.latency_p99_s
    assert facts.model.request_bytes is not None
    assert facts.model.request_bytes > 128 << 10
    assert facts.note.startswith("s3, ")


def test_a_name_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        Target.of(tmp_path / "nowhere")
