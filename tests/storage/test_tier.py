"""Tiers in use: by threads, by processes, by forked children, by those that are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.conftest import die_in, fill, kill_myself, shape_of, unit_bytes, units_of

from penstock.storage import tier as tier_module
from penstock.storage.tier_files import write_all
from penstock.storage.tier_found import found_tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk, Memory
from penstock.testing.forks import in_child, start_child, wait_for

SHAPE = shape_of([1000, 5000, 0, 4096, 1, 20_000] * 10)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with open_tiers([Memory(200_000, folder=tmp_path), Disk(tmp_path, "1MB")], SHAPE) as tiers:
        assert fill(tiers) == list(range(60))
        assert tiers.held(units_of(tiers)).all()
        assert {tier.kind for tier in tiers.tiers} == {"memory", "disk"}
        for unit in range(60):
            tier = tiers.tiers[int(tiers.tier_of(np.array([unit]))[0])]
            offset, length = int(SHAPE.offsets[unit]), int(SHAPE.lengths[unit])
            expected = unit_bytes(unit, length)
            assert os.pread(tier.descriptor, length, offset) == expected
            assert bytes(tier.read(unit)) == expected
            assert tier.check(unit)
        assert sum(tier.fill_bytes for tier in tiers.tiers) == SHAPE.size_bytes


@given(
    lengths=st.lists(st.integers(0, 50), max_size=40),
    capacities=st.lists(st.integers(1, 400), max_size=4),
)
def test_cuts_are_disjoint_within_capacity_and_split_no_unit(
    lengths: list[int], capacities: list[int]
) -> None:
    shape = shape_of(lengths)
    first, seen = 0, 0
    for capacity in capacities:
        last = shape.cut(first, capacity)
        ends = shape.offsets + shape.lengths
        owned = np.flatnonzero((shape.offsets >= first) & (ends <= last))
        assert last - first <= capacity
        assert shape.lengths[owned].sum() == last - first
        following = shape.lengths[shape.offsets >= last]
        full = following[following > 0]
        assert len(full) == 0 or last + full[0] > first + capacity
        first, seen = last, seen + int(shape.lengths[owned].sum())
    assert seen == first


def test_units_belong_to_the_tiers_in_turn_and_the_rest_to_none(tmp_path: Path) -> None:
    shape = shape_of([100] * 10)
    with open_tiers([Memory(350, folder=tmp_path), Disk(tmp_path, 420)], shape) as tiers:
        assert tiers.tier_of(units_of(tiers)).tolist() == [0] * 3 + [1] * 4 + [-1] * 3
        assert tiers.placed_bytes == 700


def test_four_processes_fill_each_unit_exactly_once(tmp_path: Path) -> None:
    shape = shape_of([300] * 400)
    waiting, starting = os.pipe()
    told, telling = os.pipe()

    def child(seed: int) -> list[int]:
        os.close(starting)
        with open_tiers([Disk(tmp_path, "1MB")], shape) as tiers:
            os.write(telling, b"x")
            os.read(waiting, 1)  # until the parent closes its end
            order = np.random.default_rng(seed).permutation(400)
            filled = []
            while not tiers.held(order).all():
                filled += fill(tiers, order[~tiers.held(order)].tolist())
            return filled

    children = [start_child(lambda seed=seed: child(seed)) for seed in range(4)]
    for _ in children:
        os.read(told, 1)
    os.close(starting)
    filled = Counter(unit for one in children for unit in wait_for(one))
    assert filled == Counter(range(400))


def test_threads_of_a_process_do_not_claim_the_same_unit(tmp_path: Path) -> None:
    with (
        open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers,
        ThreadPoolExecutor(8) as pool,
    ):
        taken = list(pool.map(lambda _: tiers.tiers[0].claim(3), range(64)))
        assert taken.count(True) == 1
        tiers.tiers[0].release(3)
        assert tiers.tiers[0].claim(3)


def test_a_unit_that_is_there_cannot_be_claimed(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers, [3])
        assert not tiers.tiers[0].claim(3)
        tiers.tiers[0].forget(3)
        assert tiers.tiers[0].claim(3)


def test_a_unit_must_be_claimed_and_whole(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        with pytest.raises(AssertionError, match="not claimed"):
            tiers.tiers[0].write(0, bytes(1000))
        assert tiers.tiers[0].claim(0)
        with pytest.raises(AssertionError, match="1000 bytes, got 999"):
            tiers.tiers[0].write(0, bytes(999))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_kill_in_the_middle_of_a_write_costs_that_unit_only(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Memory("1MB", folder=tmp_path) if kind == "memory" else Disk(tmp_path, "1MB")

    def half_then_die(descriptor: int, data: memoryview, offset: int) -> None:
        write_all(descriptor, data[: data.nbytes // 2], offset)
        kill_myself()

    def child() -> None:
        with open_tiers([wish], SHAPE) as tiers:
            fill(tiers, [0, 1, 3])
            monkeypatch.setattr(tier_module, "write_all", half_then_die)
            fill(tiers, [5])

    with open_tiers([wish], SHAPE) as tiers:
        die_in(child)
        assert np.flatnonzero(tiers.held(units_of(tiers))).tolist() == [0, 1, 3]
        assert tiers.tiers[0].claim(5)  # the claim went with its process
        assert tiers.tiers[0].write(5, unit_bytes(5, 20_000))
        assert tiers.tiers[0].check(5)


def test_a_second_loader_of_the_process_that_closes_leaves_the_first_its_claims(
    tmp_path: Path,
) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as first:
        assert first.tiers[0].claim(7)
        with open_tiers([wish], SHAPE) as second:
            assert not second.tiers[0].claim(7)
            assert found_tiers(wish)[0].is_used
        found_tiers(wish)

        def child() -> bool:
            with open_tiers([wish], SHAPE) as tiers:
                return tiers.tiers[0].claim(7)

        assert not in_child(child)


def test_a_forked_child_has_claims_of_its_own_and_shares_the_bytes(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers, [0])
        assert tiers.tiers[0].claim(1)

        def child() -> tuple[bool, list[int], bool]:
            with tiers:
                taken = tiers.tiers[0].claim(1)
                filled = fill(tiers, [0, 3])
                return taken, filled, bool(tiers.held(np.array([0]))[0])

        assert in_child(child) == (False, [3], True)
        assert tiers.held(np.array([0, 1, 3])).tolist() == [True, False, True]
        assert tiers.tiers[0].write(1, unit_bytes(1, 5000))
        assert in_child(lambda: tiers.tiers[0].claim(1)) is False


def test_a_child_does_not_inherit_claims(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        assert tiers.tiers[0].claim(1)
        waiting, going = os.pipe()

        def child() -> bool:
            os.close(going)
            os.read(waiting, 1)  # the parent has let go by now
            return tiers.tiers[0].claim(1)

        started = start_child(child)
        tiers.tiers[0].release(1)
        os.close(going)
        assert wait_for(started)


def test_a_child_that_opens_what_its_parent_has_open_keeps_its_own_locks(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:

        def child() -> tuple[bool, bool]:
            mine = open_tiers([wish], SHAPE)
            taken = mine.tiers[0].claim(9)
            tiers.close()  # the inherited one
            return taken, in_child(lambda: mine.tiers[0].claim(9))

        assert in_child(child) == (True, False)
        assert tiers.tiers[0].claim(9)


def test_after_the_fork_each_goes_its_own_way(tmp_path: Path) -> None:
    wish = Memory("1MB", folder=tmp_path)
    tiers = open_tiers([wish], SHAPE)
    fill(tiers)
    waiting, going = os.pipe()

    def child() -> bool:
        os.close(going)
        os.read(waiting, 1)  # the parent has closed and removed the tier by now
        return bytes(tiers.tiers[0].read(5)) == unit_bytes(5, 20_000)

    started = start_child(child)
    path = Path(tiers.tiers[0].path)
    tiers.close()
    assert not path.exists()
    os.close(going)
    assert wait_for(started)


@pytest.mark.parametrize("beside", ["nothing", "a file of others"])
def test_many_processes_that_come_and_go_leave_nothing(tmp_path: Path, beside: str) -> None:
    shape = shape_of([100] * 20)
    note = tmp_path / f"penstock-{os.geteuid()}" / shape.name / "note"
    if beside == "a file of others":  # the folder itself then never goes
        note.parent.mkdir(parents=True)
        note.write_text("mine")

    def child() -> int:
        for _ in range(40):
            with open_tiers([Memory("1MB", folder=tmp_path)], shape) as tiers:
                while not tiers.held(units_of(tiers)).all():
                    fill(tiers)
        return 40

    children = [start_child(child) for _ in range(4)]
    assert [wait_for(one) for one in children] == [40] * 4
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([note] if beside == "a file of others" else [])


def test_views_outlive_their_tier(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers)
        view = tiers.tiers[0].read(5)
    assert list(tmp_path.iterdir()) == []
    assert bytes(view) == unit_bytes(5, 20_000)


def test_no_units_at_all(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path), Disk(tmp_path, "1MB")], shape_of([])) as tiers:
        assert tiers.held(units_of(tiers)).tolist() == []
        assert tiers.placed_bytes == tiers.present_bytes == 0


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_kills_at_any_moment_leave_only_whole_units_and_no_claims(
    tmp_path: Path, kind: str
) -> None:
    wish = Memory("2MB", folder=tmp_path) if kind == "memory" else Disk(tmp_path, "2MB")
    shape = shape_of([100, 9000, 4096, 30_000] * 25)
    random = np.random.default_rng(5)
    told, telling = os.pipe()

    def start(seed: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        order = np.random.default_rng(seed)
        while True:
            with open_tiers([wish], shape) as tiers:
                for unit in order.permutation(shape.num_units)[:20].tolist():
                    os.write(telling, b"x")
                    tiers.tiers[0].forget(unit)
                    fill(tiers, [unit])

    running = [start(seed) for seed in range(3)]
    for _ in range(100):
        os.read(told, 1)
    for kill in range(12):
        os.read(told, int(random.integers(1, 60)))
        pid = running.pop(int(random.integers(len(running))))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        running.append(start(100 + kill))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with open_tiers([wish], shape) as tiers:
        units = units_of(tiers)
        there = tiers.present(units)
        assert there.any() or kind == "memory"  # its last user may have left in peace
        assert tiers.settle(units).tolist() == there.tolist()
        assert sorted(fill(tiers)) == np.flatnonzero(~there).tolist()
