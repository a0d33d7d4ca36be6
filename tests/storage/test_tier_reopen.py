"""Tiers that are found again: checked, reused, resized, swept, given up, never mixed up."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.storage.conftest import die_in, fill, kill_myself, shape_of, unit_bytes, units_of

from penstock.storage.tier_found import found_tiers, remove_found
from penstock.storage.tier_header import GENERATION_MAX
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk, Memory
from penstock.testing.forks import in_child, start_child, wait_for

SHAPE = shape_of([1000, 5000, 4096, 1, 20_000] * 4)
OTHER = shape_of([3000] * 5, "set-two")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def taken_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_disk_tier_is_found_again_and_checked_on_first_use(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    flip(path / "data", int(SHAPE.offsets[6]) + 100)
    with open_tiers([wish], SHAPE) as tiers:
        units = units_of(tiers)
        assert not tiers.held(units).any()
        assert tiers.unchecked(units).all()
        assert tiers.present_bytes == SHAPE.size_bytes
        good = tiers.settle(units)
        assert np.flatnonzero(~good).tolist() == [6]
        assert tiers.held(units).tolist() == good.tolist()
        assert fill(tiers) == [6]
        assert tiers.tiers[0].check(6)


def test_only_what_is_not_good_can_be_claimed_again(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    flip(path / "data", int(SHAPE.offsets[6]))
    with open_tiers([wish], SHAPE) as tiers:
        assert fill(tiers) == [6]
        assert tiers.held(units_of(tiers)).all()


def test_a_cut_data_file_and_a_lost_sum_are_noticed(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    os.truncate(path / "data", int(SHAPE.offsets[10]))
    flip(path / "sums", 8 * 2)
    with open_tiers([wish], SHAPE) as tiers:
        good = np.flatnonzero(tiers.settle(units_of(tiers))).tolist()
        assert good == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_who_joins_does_not_begin_a_generation(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)

        def child() -> bool:
            with open_tiers([wish], SHAPE) as joined:
                return bool(joined.held(units_of(joined)).all())

        assert in_child(child)
        assert tiers.held(units_of(tiers)).all()


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where flushing costs nothing."""
    path = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    yield Path(path)
    shutil.rmtree(path)


def test_generations_that_come_round_again_vouch_for_nothing(quick_folder: Path) -> None:
    wish = Disk(quick_folder, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
    for _ in range(GENERATION_MAX + 1):
        with open_tiers([wish], SHAPE) as tiers:
            assert not tiers.held(units_of(tiers)).any()
            assert tiers.unchecked(units_of(tiers)).all()
    with open_tiers([wish], SHAPE) as tiers:
        assert tiers.settle(units_of(tiers)).all()


def test_memory_that_grows_finds_units_on_disk(tmp_path: Path) -> None:
    shape = shape_of([10_000] * 10)
    with open_tiers([Memory(30_000, folder=tmp_path), Disk(tmp_path, 50_000)], shape) as tiers:
        fill(tiers)
    with open_tiers([Memory(50_000, folder=tmp_path), Disk(tmp_path, 50_000)], shape) as tiers:
        memory, disk = tiers.tiers
        assert tiers.tier_of(units_of(tiers)).tolist() == [0] * 5 + [1] * 5
        holders = [tiers.holder(unit) for unit in range(10)]
        assert holders == [None] * 3 + [disk] * 5 + [None] * 2
        assert memory.claim(3)
        assert memory.write(3, disk.read(3))
        memory.release(3)
        assert tiers.holder(3) is memory
        assert bytes(memory.read(3)) == unit_bytes(3, 10_000)


def test_a_disk_tier_keeps_to_its_size_once_the_move_is_over(tmp_path: Path) -> None:
    shape = shape_of([65536] * 10)
    sizes = [(131_072, 262_144), (262_144, 262_144)]
    for memory, disk in (*sizes, sizes[-1]):
        with open_tiers([Memory(memory, folder=tmp_path), Disk(tmp_path, disk)], shape) as tiers:
            fill(tiers)
            path = Path(tiers.tiers[1].path)
            filled = tiers.tiers[1].fill_bytes
    assert filled == 262_144
    assert taken_bytes(path / "data") <= 262_144 + 8192


def test_a_smaller_wish_gives_room_back_at_once(tmp_path: Path) -> None:
    shape = shape_of([65536] * 10)
    with open_tiers([Disk(tmp_path, "1MB")], shape) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    with open_tiers([Disk(tmp_path, 200_000)], shape) as tiers:
        assert tiers.present(units_of(tiers)).tolist() == [True] * 3 + [False] * 7
        assert tiers.settle(np.arange(3)).all()
        assert taken_bytes(path / "data") <= 200_000 + 8192


def test_jobs_with_different_wishes_share_what_is_there(tmp_path: Path) -> None:
    shape = shape_of([1000] * 10)
    with open_tiers([Disk(tmp_path, 4000)], shape) as small:
        fill(small)
        with open_tiers([Disk(tmp_path, 8000)], shape) as large:
            assert fill(large) == [4, 5, 6, 7]
            assert large.held(units_of(large)).tolist() == [True] * 8 + [False] * 2
            assert small.held(units_of(small)).tolist() == [True] * 4 + [False] * 6
            assert small.tiers[0].capacity_bytes == 4000


def test_ranks_with_the_same_share_get_the_same_size(tmp_path: Path) -> None:
    def size(share: str) -> int:
        with open_tiers([Disk(tmp_path, share)], SHAPE) as joined:
            return joined.tiers[0].capacity_bytes

    with open_tiers([Disk(tmp_path, "40%")], SHAPE) as tiers:
        of_another_job = in_child(lambda: size("30%"))
        (tmp_path / "grown").write_bytes(bytes(50_000_000))
        assert in_child(lambda: size("40%")) == tiers.tiers[0].capacity_bytes
        assert in_child(lambda: size("30%")) == of_another_job


def test_the_last_user_removes_a_memory_tier(tmp_path: Path) -> None:
    wish = Memory("1MB", folder=tmp_path)
    first = open_tiers([wish], SHAPE)
    reading, writing = os.pipe()

    def child() -> bool:
        os.close(writing)
        tiers = open_tiers([wish], SHAPE)
        fill(tiers)
        os.read(reading, 1)
        is_there = Path(tiers.tiers[0].path).exists()
        first.close()
        tiers.close()
        return is_there

    started = start_child(child)
    while not first.held(units_of(first)).all():
        pass
    first.close()
    os.close(writing)
    assert wait_for(started)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_ends_without_closing_leaves_no_memory(tmp_path: Path) -> None:
    def child() -> None:
        import atexit

        tiers = open_tiers([Memory("1MB", folder=tmp_path)], SHAPE)
        fill(tiers)
        atexit._run_exitfuncs()

    in_child(child)
    assert list(tmp_path.iterdir()) == []


def leave_behind(tmp_path: Path, *shapes: object) -> None:
    def child() -> None:
        for shape in shapes:
            fill(open_tiers([Memory("1MB", folder=tmp_path)], shape))  # type: ignore[arg-type]
        kill_myself()

    die_in(child)


def test_after_a_kill_a_memory_tier_is_reused_and_an_unrelated_one_swept(tmp_path: Path) -> None:
    leave_behind(tmp_path, SHAPE, OTHER)
    names = {path.name for path in (tmp_path / f"penstock-{os.geteuid()}").iterdir()}
    assert names == {"set-one", "set-two"}
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        assert tiers.settle(units_of(tiers)).all()
        names = {path.name for path in (tmp_path / f"penstock-{os.geteuid()}").iterdir()}
        assert names == {"set-one"}
    assert list(tmp_path.iterdir()) == []


def test_a_memory_tier_in_use_is_not_swept(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        fill(tiers)

        def child() -> int:
            with open_tiers([Memory("1MB", folder=tmp_path)], OTHER):
                return len(found_tiers(Memory(1, folder=tmp_path)))

        assert in_child(child) == 2
        assert all(map(tiers.tiers[0].check, range(SHAPE.num_units)))
        assert Path(tiers.tiers[0].path).exists()


def test_what_is_half_made_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "penstock"
    (root / "set-one").mkdir(parents=True)
    (root / "set-one" / "lock").touch()
    (root / "set-one" / ".penstock-tmp-1-state").write_bytes(b"half")
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        assert fill(tiers) == list(range(SHAPE.num_units))
        assert tiers.tiers[0].path == str(root / "set-one")


@pytest.mark.parametrize("damage", ["format", "num_units", "meta", "no meta", "sums", "state"])
def test_a_tier_that_does_not_fit_is_made_anew(tmp_path: Path, damage: str) -> None:
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    (path / "notes.txt").write_text("mine")
    if damage in ("format", "num_units"):
        flip(path / "state", 8 if damage == "format" else 16)
    elif damage == "meta":
        (path / "meta.json").write_text("{")
    elif damage == "no meta":
        (path / "meta.json").unlink()
    else:
        os.truncate(path / damage, 0)
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        assert tiers.tiers[0].path == str(path)
        assert not tiers.present(units_of(tiers)).any()
        assert fill(tiers) == list(range(SHAPE.num_units))
    assert (path / "notes.txt").read_text() == "mine"


def test_a_tier_of_another_version_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
        flip(path / "state", 8)

        def child() -> str:
            # As a program that does not share our memory would see it.
            from penstock.storage import tier_registry

            tier_registry._open.clear()
            with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as mine:
                fill(mine)
                return mine.tiers[0].path

        assert in_child(child) == f"{path}-1"
        flip(path / "state", 8)
        assert all(map(tiers.tiers[0].check, range(SHAPE.num_units)))


def test_files_of_others_survive_everything(tmp_path: Path) -> None:
    own = {"penstock/set-one/data": b"theirs", "penstock/note": b"a", "penstock/x/lock": b"b"}
    for name, data in own.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        fill(tiers)
        assert tiers.tiers[0].path == str(tmp_path / "penstock/set-one-1")
    assert [remove_found(wish, tier) for tier in found_tiers(wish)] == [True]
    left = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert left == own


def test_a_file_beside_ours_keeps_its_folder(tmp_path: Path) -> None:
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        note = Path(tiers.tiers[0].path) / "note"
        note.write_text("mine")
    assert [path.name for path in note.parent.iterdir()] == ["note"]


def test_unused_tiers_are_found_and_removed_but_not_used_ones(tmp_path: Path) -> None:
    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], OTHER) as tiers:
        fill(tiers)
    with open_tiers([wish], SHAPE):

        def child() -> list[tuple[str, bool, bool]]:
            return [(t.name, t.is_used, remove_found(wish, t)) for t in found_tiers(wish)]

        assert in_child(child) == [("set-two", False, True), ("set-one", True, False)]
    assert [tier.about["uri"] for tier in found_tiers(wish)] == ["s3://bucket/set-one/"]


def test_someone_who_is_stuck_while_opening_costs_the_tier_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.storage import process_wait, tier_locks

    wish = Disk(tmp_path, "1MB")
    with open_tiers([wish], SHAPE) as tiers:
        path = Path(tiers.tiers[0].path)
    reading, writing = os.pipe()
    told, telling = os.pipe()

    def child() -> None:
        os.close(writing)
        locks = tier_locks.RecordLocks(os.open(path / "lock", os.O_RDWR))
        assert locks.try_alone(tier_locks.OPENING)
        os.write(telling, b"x")
        os.read(reading, 1)

    started = start_child(child)
    os.read(told, 1)
    monkeypatch.setattr(process_wait, "IDLE_S_MAX", 0.05)
    with caplog.at_level(logging.WARNING), open_tiers([wish], SHAPE) as tiers:
        assert tiers.tiers == ()
    assert f"process {started[0]}, which opens or closes it and makes no progress" in caplog.text
    os.close(writing)
    wait_for(started)
