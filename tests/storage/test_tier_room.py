"""Sizes, full and tiny and read-only file systems: a smaller tier or none, never an end."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tests.storage.conftest import Mount, fill, shape_of, unit_bytes, units_of

from penstock.errors import OptionError
from penstock.memory import group_free_bytes, memory_left_bytes
from penstock.storage import tier as tier_module
from penstock.storage import tier_files
from penstock.storage.tier_found import found_tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import (
    Disk,
    Memory,
    TierAllowance,
    allowance_for,
    wished_bytes,
)
from penstock.testing.forks import in_child

SHAPE = shape_of([10_000] * 100)
LARGE = shape_of([100_000] * 100, "large")


@pytest.mark.parametrize(
    "size", ["", "many", "8XB", "-1", -1, 0, "0%", "101%", "%", True, 1.5, None]
)
def test_sizes_that_are_none_are_refused_at_birth(size: object) -> None:
    with pytest.raises(OptionError, match=re.compile("size|share|negative")):
        Memory(size)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        Disk("/scratch", size)  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["", None, 7])
def test_folders_that_are_none_are_refused_at_birth(folder: object) -> None:
    with pytest.raises(OptionError, match="is not a folder"):
        Disk(folder, "1GB")  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not exist"):
        open_tiers([Disk(tmp_path / "scrtch", "1GB")], SHAPE)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is not a folder"):
        open_tiers([Disk(tmp_path / "file", "1GB")], SHAPE)


def test_one_place_holds_one_tier(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OptionError, match="2 disk tiers"):
        open_tiers([Disk(tmp_path, "1GB"), Disk(tmp_path / "link", "2GB")], SHAPE)


def test_a_share_is_of_what_is_free() -> None:
    room = TierAllowance(free_bytes=1000, bound="", way_out="")
    assert wished_bytes(Memory("50%"), room) == 500
    assert wished_bytes(Memory(" 12.5 % "), room) == 125
    assert wished_bytes(Memory("2kB"), room) == 2000


def test_what_a_tier_holds_counts_as_free_for_it(mount: Mount) -> None:
    folder = mount("size=4m")
    sizes = []
    for _ in range(2):
        with open_tiers([Disk(folder, "50%")], shape_of([100_000] * 30)) as tiers:
            sizes.append(tiers.tiers[0].capacity_bytes)
            fill(tiers)
    assert 1_900_000 < sizes[0] < 2_100_000
    assert abs(sizes[1] - sizes[0]) < 100_000


def test_a_tiny_tmpfs_makes_a_smaller_tier_and_says_so(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=1m")
    with (
        caplog.at_level(logging.WARNING),
        open_tiers([Memory("8MB", folder=folder)], LARGE) as tiers,
    ):
        capacity = tiers.tiers[0].capacity_bytes
        assert 800_000 < capacity < 2**20
        assert len(fill(tiers)) == capacity // 100_000
        assert tiers.held(units_of(tiers)).sum() == capacity // 100_000
    (record,) = caplog.records
    assert re.search(r"will be \d+ kB instead of 8 MB", record.getMessage())
    assert "--shm-size" in record.getMessage()


def test_a_wish_above_what_is_free_is_no_matter_if_the_set_fits(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=4m")
    with (
        caplog.at_level(logging.WARNING),
        open_tiers([Memory("8GB", folder=folder)], SHAPE) as tiers,
    ):
        assert tiers.placed_bytes == SHAPE.size_bytes
    assert not caplog.records


def test_a_disk_that_fills_up_stops_that_tier_for_all_and_spoils_nothing(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=4m")
    with caplog.at_level(logging.WARNING), open_tiers([Disk(folder, "3MB")], LARGE) as tiers:
        assert fill(tiers, [0, 1]) == [0, 1]
        others = folder / "others"
        with others.open("wb", buffering=0) as file:  # somebody else takes all but a little
            file.write(bytes(allowance_for(Disk(folder, 1), str(folder)).free_bytes - 150_000))
        filled = fill(tiers, list(range(2, 20)))
        assert filled == [2]
        assert tiers.tiers[0].is_full
        assert in_child(lambda: tiers.tiers[0].is_full)
        assert in_child(lambda: fill(tiers, [9])) == []
        assert len(caplog.records) == 1
        assert "takes no more (No space left on device)" in caplog.text
        good = np.flatnonzero(tiers.held(units_of(tiers))).tolist()
        assert good == [0, 1, 2]
        assert all(bytes(tiers.tiers[0].read(u)) == unit_bytes(u, 100_000) for u in good)
        others.unlink()
        monkeypatch.setattr(tier_files, "FULL_S", 0.0)  # a minute later
        assert fill(tiers, [3, 4]) == [3, 4]


def test_what_was_half_written_is_given_back(mount: Mount) -> None:
    folder = mount("size=4m")
    wish = Disk(folder, "3MB")
    with open_tiers([wish], LARGE) as tiers:
        fill(tiers, [0])
        with (folder / "others").open("wb", buffering=0) as file:
            file.write(bytes(allowance_for(wish, str(folder)).free_bytes - 50_000))
        before_bytes = allowance_for(wish, str(folder)).free_bytes
        assert fill(tiers, [1]) == []
        # A page is shared with the neighbour, and the sums may have got one.
        assert allowance_for(wish, str(folder)).free_bytes >= before_bytes - 2 * 4096


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_looking_at_a_tier_on_a_full_tmpfs_needs_no_room(mount: Mount, kind: str) -> None:
    folder = mount("size=4m")
    wish = Memory("1MB", folder=folder) if kind == "memory" else Disk(folder, "1MB")
    shape = shape_of([3] * 200_000, "tiny")  # the states alone fill many pages
    with open_tiers([wish], shape) as tiers:
        fill(tiers, [0, 199_999])
        with (folder / "others").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                if allowance_for(Disk(folder, 1), str(folder)).free_bytes == 0:
                    break

        def child() -> tuple[int, bool, bool]:
            return (
                int(tiers.held(units_of(tiers)).sum()),
                tiers.tiers[0].check(199_999),
                tiers.tiers[0].check(100_000),
            )

        assert in_child(child) == (2, True, False)
        assert fill(tiers, [100_000]) == []


def test_no_room_at_all_leaves_the_tier_out(
    mount: Mount, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=64k")
    (folder / "others").write_bytes(bytes(65536))
    wishes = [Memory("1MB", folder=folder), Disk(tmp_path, "1MB")]
    with caplog.at_level(logging.WARNING), open_tiers(wishes, SHAPE) as tiers:
        assert [tier.kind for tier in tiers.tiers] == ["disk"]
        assert fill(tiers) == list(range(100))
    assert "no memory tier" in caplog.text
    assert "goes on without it" in caplog.text
    assert (folder / "others").stat().st_size == 65536


def test_a_read_only_folder_leaves_the_tier_out(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=1m,ro")
    with caplog.at_level(logging.WARNING), open_tiers([Disk(folder, "1MB")], SHAPE) as tiers:
        assert tiers.tiers == ()
        assert (tiers.tier_of(units_of(tiers)) == -1).all()
    assert "Read-only file system" in caplog.text
    assert "can write to" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT TESTED: root may write anywhere")
def test_a_forbidden_folder_leaves_the_tier_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o555)
    with caplog.at_level(logging.WARNING), open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        assert tiers.tiers == ()
    assert "Permission denied" in caplog.text


def test_unused_disk_tiers_make_room_oldest_first_and_no_more_than_needed(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount("size=8m")
    for age_s, name in enumerate(("newest", "middle", "oldest")):
        with open_tiers([Disk(folder, "2MB")], shape_of([100_000] * 20, name)) as tiers:
            fill(tiers)
            lock = Path(tiers.tiers[0].path) / "lock"
        os.utime(lock, (1000 - age_s, 1000 - age_s))
    with caplog.at_level(logging.WARNING), open_tiers([Disk(folder, "3MB")], LARGE) as tiers:
        assert tiers.tiers[0].capacity_bytes == 3_000_000
        assert {t.name for t in found_tiers(Disk(folder, 1))} == {"newest", "middle", "large"}
    assert "gave up the disk tier" in caplog.text
    assert "s3://bucket/oldest/" in caplog.text


def test_what_others_were_promised_is_not_free(mount: Mount) -> None:
    folder = mount("size=8m")
    with (
        open_tiers([Disk(folder, "5MB")], LARGE),
        open_tiers([Disk(folder, "5MB")], shape_of([100_000] * 60, "more")) as more,
    ):
        assert 2_800_000 < more.tiers[0].capacity_bytes < 3_500_000


def test_a_memory_tier_stops_before_the_node_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_module, "_LOOK_EVERY_BYTES", 30_000)
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE) as tiers:
        assert fill(tiers, [0, 1, 2, 3]) == [0, 1, 2, 3]
        monkeypatch.setattr(tier_module, "memory_left_bytes", lambda: 1000)
        assert fill(tiers, [4, 5, 6, 7]) == [4]
    assert "running out of memory" in caplog.text


def control_groups(root: Path, lines: str, files: dict[str, object]) -> Path:
    for name, value in ({"proc/self/cgroup": lines} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")
    return root


def test_the_limit_of_a_control_group_bounds_memory_v2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slice/job"
    root = control_groups(
        tmp_path,
        "0::/slice/job",
        {
            f"{group}/memory.max": "max",
            f"{group}/memory.current": 600,
            f"{group}/memory.stat": "anon 1\ninactive_file 100",
            "sys/fs/cgroup/slice/memory.max": 1000,
            "sys/fs/cgroup/slice/memory.current": 700,
            "sys/fs/cgroup/slice/memory.stat": "inactive_file 200",
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB",
        },
    )
    assert group_free_bytes(root) == 500
    assert memory_left_bytes(root) == 500


def test_the_limit_of_a_control_group_bounds_memory_v1(tmp_path: Path) -> None:
    root = control_groups(
        tmp_path,
        "5:cpu:/x\n4:memory:/the/hosts/path",  # in a container: our group is mounted at the top
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 5000,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 3000,
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 500",
        },
    )
    assert group_free_bytes(root) == 2500


def test_no_limit_is_no_bound(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/memory"
    root = control_groups(
        tmp_path,
        "4:memory:/",
        {f"{group}.limit_in_bytes": 2**63 - 4096, f"{group}.usage_in_bytes": 3000},
    )
    assert group_free_bytes(root) is None
    assert group_free_bytes(tmp_path / "no such system") is None
