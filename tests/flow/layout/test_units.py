"""Units: every byte of every sample lies in the unit that is said to hold it."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.flow.layout import cuts, cuts_computed
from penstock.flow.layout import units as units_module
from penstock.flow.layout.cuts import cut_table, cut_table_to
from penstock.flow.layout.cuts_computed import ObjectPlaces, SamplesCut, can_compute, computed_cut
from penstock.flow.layout.units import ALONE_BYTES, GAP_BYTES, RUN_BYTES, Units
from penstock.storage.base import ObjectInfo

NAMES = [
    "small_tar",
    "mixed_tar",
    "large_tar",
    "two_tables",
    "large_rows",
    "parquet",
    "files",
    "several_parts",
]
VIEWS: dict[str, Callable[[penstock.Dataset], penstock.Dataset]] = {
    "whole": lambda d: d,
    "range": lambda d: d[3 : len(d) - 4],
    "one": lambda d: d[5:6],
    "backwards": lambda d: d[::-1],
    "strided": lambda d: d[2::3],
    "ids": lambda d: d.select(np.random.default_rng(3).permutation(len(d))[: len(d) // 2]),
    "repeated": lambda d: d.select([4, 4, 5, 2, 4]),
    "mostly": lambda d: d.select(np.random.default_rng(4).random(len(d)) < 0.9),
}

Sets = dict[str, penstock.Dataset]


def by_part(dataset: penstock.Dataset) -> list[tuple[int, Ints]]:
    numbers = {id(b): n for n, b in enumerate(dataset.bound)}
    return [(numbers[id(b)], ids) for b, _, ids in dataset.groups(np.arange(len(dataset)))]


def unit_bytes(dataset: penstock.Dataset, units: Units, unit: int) -> memoryview:
    e = units.extent(unit)
    return dataset.bound[e.bound_number].read(e.table, e.object, e.offset, e.length)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_lies_in_its_unit(datasets: Sets, name: str, view: str) -> None:
    dataset = VIEWS[view](datasets[name])
    units = Units.of(dataset)
    held = [bytes(unit_bytes(dataset, units, u)) for u in range(units.num_units)]
    assert [len(b) for b in held] == units.lengths.tolist()
    assert units.size_bytes == sum(map(len, held))
    used = set()
    for number, ids in by_part(dataset):
        for table in range(len(dataset.bound[number].part.tables)):
            found, inside = units.locate(number, table, ids)
            extents = dataset.bound[number].part.tables[table].extents(ids)
            used |= set(found.tolist())
            rows = zip(found, inside, extents.object, extents.offset, extents.length, strict=True)
            for u, i, obj, offset, length in rows:
                expected = dataset.bound[number].read(table, int(obj), int(offset), int(length))
                assert held[u][i : i + length] == expected
    assert used == set(range(units.num_units)), "no unit without a sample of the view"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_the_samples_of_a_unit_are_those_that_are_located_in_it(
    datasets: Sets, name: str, view: str
) -> None:
    dataset = VIEWS[view](datasets[name])
    units = Units.of(dataset)
    for number, ids in by_part(dataset):
        for table, kind in enumerate(dataset.bound[number].part.tables):
            found, _ = units.locate(number, table, ids)
            for u in np.unique(found).tolist():
                first, count = units.samples_of(u)
                located = np.unique(ids[found == u])
                if kind.addressing == "blocks":  # A view may hold a part of a block.
                    assert first <= located[0]
                    assert located[-1] < first + count
                else:
                    assert located.tolist() == list(range(first, first + count))


@pytest.mark.parametrize("name", NAMES)
def test_extents_of_many_units_are_those_of_each(datasets: Sets, name: str) -> None:
    units = Units.of(datasets[name])
    some = np.random.default_rng(0).permutation(units.num_units)
    tables, objects, offsets, lengths = units.extents(some)
    for row in zip(some, tables, objects, offsets, lengths, strict=True):
        u, table, obj, offset, length = map(int, row)
        e = units.extent(u)
        assert units.tables[table] == (e.bound_number, e.table)
        assert (e.object, e.offset, e.length) == (obj, offset, length)


def test_large_samples_are_units_and_small_ones_share(datasets: Sets) -> None:
    assert Units.of(datasets["large_tar"]).num_units == 20
    assert Units.of(datasets["large_rows"]).num_units == 12
    assert Units.of(datasets["files"]).num_units == 30, "one never spans two objects"
    assert Units.of(datasets["parquet"]).num_units == 14
    two = Units.of(datasets["two_tables"])
    assert two.tables == [(0, 0), (0, 1)]
    assert two.num_units == -(-400 * 1_500 // RUN_BYTES) + 1
    small = Units.of(datasets["small_tar"])
    assert small.num_units < 15
    assert small.lengths.max() < RUN_BYTES + ALONE_BYTES


def test_a_block_is_kept_where_a_view_has_one_sample_of_it(datasets: Sets) -> None:
    dataset = datasets["parquet"].select([0, 16, 17, 199])
    units = Units.of(dataset)
    assert units.num_units == 3
    assert [units.samples_of(u) for u in range(3)] == [(0, 15), (15, 15), (190, 10)]


def test_the_name_is_that_of_the_content(datasets: Sets) -> None:
    tar = datasets["small_tar"]
    name = Units.of(tar).name
    assert name == Units.of(pickle.loads(pickle.dumps(tar))).name
    others = {Units.of(d).name for d in (tar[1:], tar[::-1], datasets["large_tar"])}
    assert len({name} | others) == 4
    assert bytes.fromhex(name)


def test_a_mixture_has_the_units_of_all_its_sets(datasets: Sets) -> None:
    views = [datasets["small_tar"][:50], datasets["several_parts"][::2], datasets["two_tables"]]
    units = Units.of(Mixture(views))
    alone = [Units.of(d) for d in views]
    assert units.lengths.tolist() == np.concatenate([u.lengths for u in alone]).tolist()
    assert units.locate(4, 1, np.array([399]))[0] == [units.num_units - 1]


def test_an_empty_view_has_no_units(datasets: Sets) -> None:
    units = Units.of(datasets["small_tar"][:0])
    assert (units.num_units, units.size_bytes, len(units.lengths)) == (0, 0, 0)


def even_part(counts: list[int], base: int, stride: int, width: int) -> Part:
    size = base + max(counts, default=0) * max(stride, width) + width
    objects = [ObjectInfo(key=f"{i}.npy", size_bytes=size) for i in range(len(counts))]
    columns = {"base": base, "stride": stride, "width": width}
    rows = Rows(
        objects=objects,
        counts=counts,
        addressing="even",
        columns={k: np.full(len(counts), v, np.int64) for k, v in columns.items()},
    )
    return make_part(format="npy", fields=(), tables=[rows])


@given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    base=st.integers(0, 300_000),
    stride=st.integers(0, 9_000) | st.integers(0, 200_000),
    width=st.integers(0, 5_000) | st.integers(60_000, 70_000),
    ends=st.tuples(st.integers(0, 360), st.integers(0, 360)),
)
def test_even_rows_are_cut_by_the_same_rule_without_looking_at_each(
    counts: list[int], base: int, stride: int, width: int, ends: tuple[int, int]
) -> None:
    table = even_part(counts, base, stride, width).tables[0]
    low, high = sorted(min(e, sum(counts)) for e in ends)
    if low == high:
        return
    cut = cut_table(table, range(low, high))
    starts, lengths = cuts._cut_runs(table, range(low, high)) or (None, None)
    firsts = [cut.samples_of(u)[0] for u in range(cut.num_units)]
    assert firsts == starts.tolist()
    assert cut.lengths.tolist() == lengths.tolist()
    if can_compute(table):
        asked = computed_cut(table, range(low, high))
        assert asked.num_units == cut.num_units
        assert asked.lengths[np.arange(cut.num_units)].tolist() == lengths.tolist()
        ids = np.arange(low, high)
        for one, other in zip(asked.locate(ids), cut.locate(ids), strict=True):
            assert one.tolist() == other.tolist()


@given(
    sizes=st.lists(st.integers(0, 3_000) | st.integers(0, 80_000), min_size=1, max_size=60),
    gaps=st.lists(st.sampled_from([0, 512, GAP_BYTES, GAP_BYTES + 1]), min_size=60, max_size=60),
    order=st.randoms(use_true_random=False) | st.none(),
)
def test_runs_follow_the_rule(sizes: list[int], gaps: list[int], order: object) -> None:
    length = np.array(sizes, np.int64)
    offset = np.cumsum(length + gaps[: len(sizes)]) - length
    if order is not None:
        shuffled = list(range(len(sizes)))
        order.shuffle(shuffled)  # type: ignore[attr-defined]
        length, offset = length[shuffled], offset[shuffled]
    rows = Rows(
        objects=[ObjectInfo(key="a.tar", size_bytes=int(offset.max() + 100_000))],
        counts=[len(sizes)],
        addressing="extents",
        columns={"offset": offset, "length": length},
    )
    table = make_part(format="tar", fields=(), tables=[rows]).tables[0]
    cut = cut_table(table, range(len(sizes)))
    covered = []
    for unit in range(cut.num_units):
        first, count = cut.samples_of(unit)
        covered += list(range(first, first + count))
        ids = slice(first, first + count)
        assert count == 1 or (length[ids] < ALONE_BYTES).all()
        assert len(np.unique(offset[ids] // RUN_BYTES)) == 1
        assert (np.diff(offset[ids]) > 0).all()
        assert cut.lengths[unit] == (offset[ids] + length[ids]).max() - offset[first]
        between = offset[ids][1:] - (offset[ids] + length[ids])[:-1]
        assert (between <= GAP_BYTES).all()
        if first:
            a, b = first - 1, first
            assert (
                max(length[a], length[b]) >= ALONE_BYTES
                or offset[a] // RUN_BYTES != offset[b] // RUN_BYTES
                or offset[b] <= offset[a]
                or offset[b] - offset[a] - length[a] > GAP_BYTES
            ), "a unit ends only where the rule says so"
    assert covered == list(range(len(sizes)))


def test_pieces_looked_at_apart_give_the_same_units(monkeypatch: pytest.MonkeyPatch) -> None:
    length = np.random.default_rng(2).integers(500, 9_000, 3_000)
    rows = Rows(
        objects=[ObjectInfo(key="a.tar", size_bytes=int(length.sum()))],
        counts=[3_000],
        addressing="extents",
        columns={"offset": np.cumsum(length) - length, "length": length},
    )
    table = make_part(format="tar", fields=(), tables=[rows]).tables[0]
    whole = cuts._cut_runs(table, range(3_000))
    ids = np.delete(np.arange(3_000), [700, 1_500])
    view = cuts._cut_runs(table, ids)
    monkeypatch.setattr(cuts, "_CHUNK_SAMPLES", 300)
    for expected, chosen in ((whole, range(3_000)), (view, ids)):
        for a, b in zip(expected, cuts._cut_runs(table, chosen), strict=True):
            assert a.tolist() == b.tolist()


def computed(dataset: penstock.Dataset | Mixture, monkeypatch: pytest.MonkeyPatch) -> Units:
    """Return the units of a small data set as if it were very large."""
    with monkeypatch.context() as patch:
        patch.setattr(units_module, "UNITS_MAX", -1)
        return Units.of(dataset)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_units_that_are_computed_are_those_that_would_be_kept(
    datasets: Sets, name: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = VIEWS[view](datasets[name])
    kept, asked = Units.of(dataset), computed(dataset, monkeypatch)
    assert (kept.is_computed, asked.is_computed) == (False, True)
    assert kept.name != asked.name
    assert kept.tables == asked.tables
    used = []
    for number, ids in by_part(dataset):
        for table in range(len(dataset.bound[number].part.tables)):
            (some, inside), (same, same_inside) = (
                u.locate(number, table, ids) for u in (kept, asked)
            )
            assert inside.tolist() == same_inside.tolist()
            for one, other in zip(some.tolist(), same.tolist(), strict=True):
                assert kept.extent(one) == asked.extent(other)
                assert kept.samples_of(one) == asked.samples_of(other)
            used.append(np.unique(same))
    units = np.concatenate(used)
    assert asked.lengths[units].tolist() == [asked.extent(u).length for u in units.tolist()]
    for one, many in zip(
        asked.extents(units), kept.extents(np.arange(kept.num_units)), strict=True
    ):
        assert one.tolist() == many.tolist()
    numbers = asked.between(0, asked.num_units - 1)
    if name != "parquet":  # there also blocks outside the view have numbers
        assert numbers.tolist() == [u for u in units.tolist() if asked.lengths[u]]
    assert asked.size_bytes >= kept.size_bytes


def test_a_mixture_of_computed_units(datasets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    views = [datasets["small_tar"][:50], datasets["several_parts"][::2], datasets["two_tables"]]
    kept, asked = Units.of(Mixture(views)), computed(Mixture(views), monkeypatch)
    numbers = asked.between(0, asked.num_units - 1)
    assert asked.lengths[numbers].tolist() == kept.lengths[:].tolist()


@given(
    sizes=st.lists(st.integers(1, 3_000) | st.integers(1, 80_000), min_size=1, max_size=60),
    gaps=st.lists(st.sampled_from([0, 512, GAP_BYTES, GAP_BYTES + 1]), min_size=60, max_size=60),
    left_out=st.sets(st.integers(0, 59)),
    window=st.sampled_from([1, 2, 8]),
)
def test_computed_runs_follow_the_rule(
    sizes: list[int], gaps: list[int], left_out: set[int], window: int
) -> None:
    length = np.array(sizes, np.int64)
    offset = np.cumsum(length + gaps[: len(sizes)]) - length
    counts = [len(sizes) // 2, len(sizes) - len(sizes) // 2]
    rows = Rows(
        objects=[ObjectInfo(key=k, size_bytes=int(offset.max() + 100_000)) for k in "ab"],
        counts=counts,
        addressing="extents",
        columns={"offset": offset, "length": length},
    )
    table = make_part(format="tar", fields=(), tables=[rows]).tables[0]
    ids = np.array([i for i in range(len(sizes)) if i not in left_out], np.int64)
    for chosen in (range(len(sizes)), ids) if len(ids) else (range(len(sizes)),):
        found = cuts._cut_runs(table, chosen)
        assert found is not None
        cut = SamplesCut(table, chosen)
        cut._window = window
        every = np.arange(len(chosen))
        begins = np.flatnonzero(cut.lengths[every])
        assert cut._ids(begins).tolist() == found[0].tolist()
        assert cut.lengths[begins].tolist() == found[1].tolist()
        units, _ = cut.locate(cut._ids(every))
        place = np.searchsorted(begins, every, side="right") - 1
        assert units.tolist() == begins[place].tolist()


def test_objects_have_their_places_however_many_sums_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = np.random.default_rng(1).integers(0, 1000, 50)
    rows = Rows(
        objects=[ObjectInfo(key=str(i), size_bytes=int(s)) for i, s in enumerate(sizes)],
        counts=[1] * 50,
        addressing="extents",
        columns={"offset": np.zeros(50, np.int64), "length": sizes},
    )
    table = make_part(format="files", fields=(), tables=[rows]).tables[0]
    monkeypatch.setattr(cuts_computed, "_OBJECTS_A_SUM", 3)
    for objects_max in (100, 12):
        monkeypatch.setattr(cuts_computed, "_OBJECTS_MAX", objects_max)
        places = ObjectPlaces(table, range(7, 45))
        expected = np.cumsum(sizes[7:45]) - sizes[7:45]
        assert places.begins(np.arange(7, 45)).tolist() == expected.tolist()
        assert places.size_bytes == sizes[7:45].sum()


def test_rows_that_overlap_are_kept_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_compute(even_part([100], 0, 512, 512).tables[0])
    assert not can_compute(even_part([100], 0, 2, 512).tables[0])


def test_the_names_of_ordinary_units_stay_what_they_were() -> None:
    assert Units([], "a fingerprint").name == "58274b4fbdde9cf91d330786ad0136a0"


def test_many_samples_are_not_looked_at_to_find_out_that_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuts, "SAMPLES_MAX", 10)
    length = np.full(100, 110_000, np.int64)
    rows = Rows(
        objects=[ObjectInfo(key="a.tar", size_bytes=11_000_000)],
        counts=[100],
        addressing="extents",
        columns={"offset": np.arange(100) * 110_000, "length": length},
    )
    table = make_part(format="tar", fields=(), tables=[rows]).tables[0]
    assert cut_table_to(table, range(11), 10**6) is None
    assert cut_table_to(table, range(10), 10**6) is not None
    assert cut_table_to(table, range(10), 9) is None


def test_a_million_large_samples_cost_their_lengths_and_no_more() -> None:
    count = 1_000_000
    length = np.full(count, 110_000, np.int64)
    rows = Rows(
        objects=[ObjectInfo(key=f"{i}.tar", size_bytes=110_000 * 1_000) for i in range(1_000)],
        counts=[1_000] * 1_000,
        addressing="extents",
        columns={"offset": np.arange(count) % 1_000 * 110_000, "length": length},
    )
    table = make_part(format="tar", fields=(), tables=[rows]).tables[0]
    tracemalloc.start()
    cut = cut_table(table, range(count))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cut.num_units == count
    assert kept_bytes < 8 * count * 1.1


def test_a_billion_rows_are_cut_without_an_array_as_long() -> None:
    table = even_part([500_000_000] * 2, 128, 512, 512).tables[0]
    tracemalloc.start()
    cut = cut_table(table, range(1_000_000_000))
    asked = computed_cut(table, range(1_000_000_000))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cut.num_units == asked.num_units == pytest.approx(1e9 / 256, rel=0.01)
    assert peak_bytes < 1 << 30
    ids = np.array([0, 255, 256, 999_999_999])
    units, inside = asked.locate(ids)
    assert units.tolist() == [0, 0, 1, cut.num_units - 1] == cut.locate(ids)[0].tolist()
    assert inside.tolist()[:3] == [0, 255 * 512, 0]
