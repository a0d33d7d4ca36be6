"""Tiers of a node among others: what belongs to it changes, and no byte moves for that."""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.conftest import Mount, die_in, fill, kill_myself, shape_of, unit_bytes, units_of

from penstock.storage import process_wait
from penstock.storage import tier as tier_module
from penstock.storage.tier import Tiers
from penstock.storage.tier_files import TierFiles
from penstock.storage.tier_found import found_tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_places import NOWHERE, UnitPlaces
from penstock.storage.tier_shape import Bools
from penstock.storage.tier_sizes import Disk, Memory, Wish, allowance_for
from penstock.testing.forks import in_child, start_child, wait_for

SPAN = 65536
SHAPE = shape_of([32768] * 64)  # two units a span, 2 MiB in all


def spans_with(*numbers: int) -> Bools:
    spans = np.zeros(33, np.bool_)
    spans[list(numbers)] = True
    return spans


def units_in(*numbers: int) -> list[int]:
    return [unit for number in numbers for unit in (2 * number, 2 * number + 1)]


def opened(wish: Wish, *numbers: int) -> Tiers:
    tiers = open_tiers([wish], SHAPE, placed=False)
    tiers.place(SPAN, spans_with(*numbers))
    return tiers


def run_node(wish: Wish, numbers: list[int], *, num_ranks: int = 2) -> Counter[int]:
    """Let the ranks of a node, each a process, place and fill; return what was fetched."""

    def rank(seed: int) -> list[int]:
        with opened(wish, *numbers) as tiers:
            order = np.random.default_rng(seed).permutation(units_in(*numbers))
            order = order[tiers.tier_of(order) != NOWHERE]
            filled = []
            while not tiers.held(order).all():
                filled += fill(tiers, order[~tiers.held(order)].tolist())
            assert all(tiers.tiers[0].check(unit) for unit in order.tolist())
            return filled

    ranks = [start_child(lambda seed=seed: rank(seed)) for seed in range(num_ranks)]
    return Counter(unit for one in ranks for unit in wait_for(one))


def lying(wish: Wish) -> list[int]:
    with open_tiers([wish], SHAPE, placed=False) as tiers:
        return np.flatnonzero(tiers.present(units_of(tiers))).tolist()


def taken_bytes(tiers: Tiers) -> int:
    return os.fstat(tiers.tiers[0].descriptor).st_blocks * 512


def test_no_unit_has_a_place_before_it_is_said_which(tmp_path: Path) -> None:
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE, placed=False) as tiers:
        assert (tiers.tier_of(units_of(tiers)) == NOWHERE).all()
        assert (tiers.placed_bytes, tiers.capacity_bytes) == (0, 10**6)
        tiers.place(SPAN, spans_with(1, 30))
        assert np.flatnonzero(tiers.tier_of(units_of(tiers)) == 0).tolist() == [2, 3, 60, 61]
        assert sorted(fill(tiers)) == [2, 3, 60, 61]
        assert bytes(tiers.tiers[0].read(61)) == unit_bytes(61, 32768)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    capacities=st.lists(st.integers(1, 300), max_size=3),
    calls=st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_spans_fill_the_tiers_in_turn_and_stay_where_they_are(
    lengths: list[int], capacities: list[int], calls: list[set[int]], seed: int
) -> None:
    shape = shape_of(np.random.default_rng(seed).permutation(lengths).tolist())
    places = UnitPlaces.nowhere(shape, len(capacities))
    for call in calls:
        spans = np.zeros(2001, np.bool_)
        spans[list(call)] = True
        more = places.with_spans(shape, 50, spans, capacities)
        before, after = (p.tier_of(np.arange(shape.num_units)) for p in (places, more))
        had = before != NOWHERE
        assert (after[had] == before[had]).all()
        assert (spans[shape.offsets // 50] >= (after != NOWHERE))[~had].all()
        new = after[~had & spans[shape.offsets // 50]]
        assert (np.diff(np.where(new == NOWHERE, 99, new)) >= 0).all(), "the fastest first"
        sums = [int(shape.lengths[after == n].sum()) for n in range(len(capacities))]
        assert sums == more.placed_bytes
        assert all(s <= c for s, c in zip(sums, capacities, strict=True))
        left_out = shape.lengths[~had & spans[shape.offsets // 50] & (after == NOWHERE)]
        if len(left_out) and capacities:
            assert sums[-1] + left_out[0] > capacities[-1]
        places = more


def test_what_the_capacity_says_surely_finds_a_place(tmp_path: Path) -> None:
    shape = shape_of([700] * 30)
    with open_tiers(
        [Memory(5000, folder=tmp_path), Disk(tmp_path, 6000)], shape, placed=False
    ) as tiers:
        assert tiers.capacity_bytes == 5000 + 6000 - 700
        tiers.place(700 * 14, np.array([False, True, False]))  # 9800 bytes
        assert tiers.tier_of(np.arange(14, 28)).tolist() == [0] * 7 + [1] * 7


def test_nodes_that_come_and_go_fetch_only_what_they_lack(tmp_path: Path) -> None:
    (a, b) = (tmp_path / "a", tmp_path / "b")
    a.mkdir()
    b.mkdir()
    wishes = [Disk(a, 24 * SPAN), Disk(b, 24 * SPAN)]
    even, odd, every = list(range(0, 32, 2)), list(range(1, 32, 2)), list(range(32))
    assert run_node(wishes[0], even) == Counter(units_in(*even))
    assert run_node(wishes[1], odd) == Counter(units_in(*odd))
    # b is lost: a takes what it has room for, and fetches nothing again
    taken = units_in(*range(24))
    lacking = Counter(u for u in taken if u not in units_in(*even))
    assert run_node(wishes[0], every, num_ranks=6) == lacking
    # what was a's and has no place there now is spare; it made way only as far as it had to
    assert lying(wishes[0]) == taken
    # b is back, and a third one has joined: again only what is lacking
    third, rest = list(range(0, 32, 3)), [n for n in range(32) if n % 3]
    assert run_node(wishes[0], rest) == Counter(units_in(*(n for n in rest if n >= 24)))
    assert run_node(wishes[1], third) == Counter(units_in(*(n for n in third if n % 2 == 0)))
    for wish, placed in ((wishes[0], rest), (wishes[1], third)):
        there = lying(wish)
        assert len(there) * 32768 <= 24 * SPAN
        assert set(units_in(*placed)) <= set(there)


def test_spans_of_a_lost_node_are_adopted_up_to_the_capacity(tmp_path: Path) -> None:
    with opened(Disk(tmp_path, 3 * SPAN), 4, 9) as tiers:
        fill(tiers)
        tiers.place(SPAN, spans_with(0, 4, 9, 12))
        assert np.flatnonzero(tiers.tier_of(units_of(tiers)) == 0).tolist() == units_in(0, 4, 9)
        assert tiers.placed_bytes == 3 * SPAN
        assert fill(tiers) == units_in(0)


def test_what_others_use_is_not_dropped_and_what_nobody_vouched_for_is(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 4 * SPAN)
    with opened(wish, 0, 1, 2, 3) as tiers:
        fill(tiers)
    with opened(wish, 0, 10, 11) as tiers:
        assert tiers.holder(2) is tiers.tiers[0]  # served, hence vouched for
        assert len(fill(tiers, units_in(10))) == 2
        there = np.flatnonzero(tiers.present(units_of(tiers))).tolist()
        assert set(units_in(0, 10)) | {2} < set(there)
        assert taken_bytes(tiers) <= 4 * SPAN
        fill(tiers)
        assert tiers.held(np.array(units_in(0, 10, 11))).sum() >= 4
        assert bytes(tiers.tiers[0].read(2)) == unit_bytes(2, 32768)


def test_spare_units_stay_while_there_is_room(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 8 * SPAN)
    with opened(wish, 0, 1, 2, 3) as tiers:
        fill(tiers)
    with opened(wish, 20, 21, 22, 23) as tiers:
        fill(tiers)
    assert lying(wish) == units_in(0, 1, 2, 3, 20, 21, 22, 23)


def test_jobs_with_and_without_other_nodes_share_a_folder(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 4 * SPAN)
    alone = open_tiers([wish], SHAPE)
    fill(alone, [0, 1, 2])
    alone.close()
    with open_tiers([wish], SHAPE) as alone, open_tiers([wish], SHAPE, placed=False) as among:
        assert fill(alone, [3]) == [3]
        among.place(SPAN, spans_with(1, 2, 8, 9))

        def child() -> list[int]:
            with opened(wish, 1, 2, 8, 9) as joined:
                return fill(joined)

        # 2 is found good, 3 is there, and nothing of the other's, checked or not, is dropped
        assert in_child(child) == [4, 5, *units_in(8, 9)]
        assert among.held(np.array(units_in(1, 2, 8, 9))).sum() == 8
        assert fill(alone) == [6, 7]
        assert alone.held(np.arange(8)).all()
        assert all(alone.tiers[0].check(unit) for unit in range(8))


def test_a_job_alone_that_comes_later_finds_what_a_node_among_others_left(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 4 * SPAN)
    assert run_node(wish, [0, 3, 30]) == Counter(units_in(0, 3, 30))
    with open_tiers([wish], SHAPE) as tiers:
        assert fill(tiers) == units_in(1, 2)
        assert tiers.tiers[0].fill_bytes <= 4 * SPAN


def test_kill_while_placing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Disk(tmp_path, 4 * SPAN)

    def child() -> None:
        tiers = open_tiers([wish], SHAPE, placed=False)
        monkeypatch.setattr(TierFiles, "add_term", lambda *_: kill_myself())
        tiers.place(SPAN, spans_with(0, 1))

    with open_tiers([wish], SHAPE, placed=False) as tiers:
        die_in(child)
        monkeypatch.setattr(process_wait, "IDLE_S_MAX", 0.0)
        tiers.place(SPAN, spans_with(0, 1))
        assert fill(tiers) == [0, 1, 2, 3]
        assert tiers.tiers[0].files.read_header().promised_bytes == 2 * SPAN


def test_kill_while_dropping_leaves_nothing_that_counts_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Disk(tmp_path, 4 * SPAN)
    run_node(wish, [0, 1, 2, 3])

    def child() -> None:
        with opened(wish, 10, 11) as tiers:
            monkeypatch.setattr(TierFiles, "punch", lambda *_: kill_myself())
            fill(tiers)

    die_in(child)
    with opened(wish, 10, 11) as tiers:
        assert taken_bytes(tiers) == 4 * SPAN  # its state went, its bytes did not
        assert tiers.present(units_of(tiers)).sum() == 7
        assert fill(tiers) == units_in(10, 11)
        assert taken_bytes(tiers) == 4 * SPAN
        there = units_of(tiers)[tiers.present(units_of(tiers))]
        assert tiers.tiers[0].settle(there).all()


def test_a_unit_that_is_dropped_after_it_was_found_good_is_not_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Disk(tmp_path, 2 * SPAN)
    run_node(wish, [0, 1])
    with opened(wish, 1, 10) as tiers:
        (tier,), read_unit = tiers.tiers, tier_module.read_unit

        def and_then_dropped(*args: Any) -> memoryview | None:
            answer = read_unit(*args)
            in_child(lambda: fill(tiers, [20]))
            return answer

        monkeypatch.setattr(tier_module, "read_unit", and_then_dropped)
        assert not tier.settle(np.array([0]))[0]
        monkeypatch.undo()
        assert not tier.present(np.array([0]))[0]
        assert tier.is_held(20)


def test_ranks_that_drop_and_vouch_at_once_never_vouch_for_a_hole(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 20 * SPAN)
    halves = [list(range(16)), list(range(16, 32))]
    run_node(wish, halves[0])

    def rank(seed: int, placed: list[int]) -> int:
        order = np.random.default_rng(seed).permutation(64)
        with opened(wish, *placed) as tiers:
            if seed % 2:  # fills, and drops for that
                return len(fill(tiers, order.tolist()))
            return int(sum(tiers.tiers[0].settle(order[i : i + 1])[0] for i in range(64)))

    done = []
    for number in range(6):
        with open_tiers([wish], SHAPE, placed=False) as tiers:
            ranks = [
                start_child(lambda seed=seed, half=halves[(number + 1) % 2]: rank(seed, half))
                for seed in range(4 * number, 4 * number + 4)
            ]
            done.append([wait_for(one) for one in ranks])
            held = np.flatnonzero(tiers.tiers[0].held(units_of(tiers))).tolist()
            assert all(tiers.tiers[0].check(unit) for unit in held)
    assert min(max(one) for one in done) > 0


def test_a_disk_that_fills_up_first_costs_what_is_spare(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=4m")
    wish = Disk(folder, 32 * SPAN)
    with opened(wish, *range(8)) as tiers:
        fill(tiers)
    with caplog.at_level(logging.WARNING), opened(wish, *range(16, 32)) as tiers:
        with (folder / "others").open("wb", buffering=0) as file:  # all but four units
            file.write(bytes(allowance_for(wish, str(folder)).free_bytes - 4 * 32768 - 8192))
        filled = fill(tiers)
        # its own room and that of the 16 units from before
        assert len(filled) in (19, 20)
        assert tiers.tiers[0].is_full
        assert all(tiers.tiers[0].check(unit) for unit in filled)
    assert "takes no more (No space left on device)" in caplog.text


def test_a_file_system_with_too_small_files_leaves_the_tier_out_before_others_count_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def child() -> tuple[int, str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with open_tiers([Disk(tmp_path, 4 * SPAN)], SHAPE, placed=False) as tiers:
            return tiers.capacity_bytes, caplog.text

    capacity_bytes, text = in_child(child)
    assert capacity_bytes == 0
    assert "needs a sparse file of 2.1 MB" in text
    assert "give a folder on XFS" in text
    assert "goes on without it" in text


def test_all_ranks_that_open_at_once_agree_on_who_they_are(tmp_path: Path) -> None:
    def rank() -> str:
        with open_tiers([Disk(tmp_path, "1MB")], SHAPE, placed=False) as tiers:
            return tiers.identity

    names = {wait_for(one) for one in [start_child(rank) for _ in range(6)]}
    assert len(names) == 1
    assert len(bytes.fromhex(*names)) == 16
    assert in_child(rank) in names
    assert {tier.node for tier in found_tiers(Disk(tmp_path, 1))} == names
    assert [p.name for p in (tmp_path / "penstock").iterdir() if p.is_file()] == ["identity"]


def test_memory_alone_has_a_name_until_its_last_user_leaves(tmp_path: Path) -> None:
    wishes = [Memory("1MB", folder=tmp_path)]
    with open_tiers(wishes, SHAPE, placed=False) as tiers:

        def rank() -> str:
            with open_tiers(wishes, SHAPE, placed=False) as joined:
                return joined.identity

        name = tiers.identity
        assert in_child(rank) == name == found_tiers(wishes[0])[0].node
    assert list(tmp_path.iterdir()) == []
    with open_tiers(wishes, SHAPE, placed=False) as tiers:
        assert tiers.identity != name


def test_a_disk_gives_the_name_also_behind_memory(tmp_path: Path) -> None:
    (memory, disk) = Memory("1MB", folder=tmp_path), Disk(tmp_path, "1MB")
    with open_tiers([memory, disk], SHAPE, placed=False) as tiers:
        name = tiers.identity
    with open_tiers([disk], SHAPE, placed=False) as tiers:
        assert tiers.identity == name
    with open_tiers([], SHAPE, placed=False) as nothing:
        assert nothing.identity != name


def test_a_name_that_is_none_is_said_and_all_ranks_still_agree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "identity").write_text("mine")

    def rank() -> str:
        with open_tiers([Disk(tmp_path, "1MB")], SHAPE, placed=False) as tiers:
            return tiers.identity

    assert rank() == in_child(rank)
    assert "remove the file" in caplog.text
    assert (tmp_path / "penstock" / "identity").read_text() == "mine"


def test_what_another_node_asks_for_is_bounded_before_it_is_looked_at(tmp_path: Path) -> None:
    with opened(Disk(tmp_path, "1MB"), 0) as tiers:
        fill(tiers)
        (tier,) = tiers.tiers
        assert tier.covers(0, 0, 32768)
        assert tier.covers(63, SHAPE.size_bytes - 5, 5)
        assert not tier.covers(64, 0, 1)
        assert not tier.covers(-1, 0, 1)
        assert not tier.covers(0, -1, 1)
        assert not tier.covers(0, 5, -1)
        assert not tier.covers(63, SHAPE.size_bytes - 5, 6)
        assert tier.is_held(0)
        assert not tier.is_held(2)
        assert tier.sum_of(1) == tier.sums_of(np.array([1]))[0] != 0
        assert tier.settle_at(1, 32768, 32768)
        assert not tier.settle_at(2, 65536, 32768)
