"""Folders in places that everybody can write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.storage.conftest import fill, shape_of

from penstock.errors import OptionError
from penstock.storage.tier_folders import is_shared_by_nodes
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_sizes import Disk, Memory

SHAPE = shape_of([1000] * 10)
UID = os.geteuid()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_can_look_into_a_tier(tmp_path: Path) -> None:
    wishes = [Memory(5000, folder=tmp_path), Disk(tmp_path, "1MB")]
    umask = os.umask(0)
    try:
        with open_tiers(wishes, SHAPE) as tiers:
            fill(tiers)
            for tier in tiers.tiers:
                assert mode(Path(tier.path)) == 0o700
                assert {mode(path) for path in Path(tier.path).iterdir()} == {0o600}
            assert mode(tmp_path / f"penstock-{UID}") == 0o700
    finally:
        os.umask(umask)


def test_our_own_folder_is_made_private_again(tmp_path: Path) -> None:
    root = tmp_path / f"penstock-{UID}"
    root.mkdir()
    root.chmod(0o777)
    with open_tiers([Memory("1MB", folder=tmp_path)], SHAPE):
        assert mode(root) == 0o700


@pytest.mark.parametrize("depth", ["root", "tier"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_links_are_refused_and_not_followed(tmp_path: Path, depth: str, kind: str) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    link = shared / (f"penstock-{UID}" if kind == "memory" else "penstock")
    if depth == "tier":
        link.mkdir()
        link = link / SHAPE.name
    link.symlink_to(trap)
    wish = Memory("1MB", folder=shared) if kind == "memory" else Disk(shared, "1MB")
    with pytest.raises(OptionError, match="link"):
        open_tiers([wish], SHAPE)
    assert list(trap.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "data", "state", "sums", "meta.json"])
def test_links_instead_of_files_lead_nowhere(tmp_path: Path, name: str) -> None:
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers)
        path = Path(tiers.tiers[0].path)
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (path / name).unlink()
    (path / name).symlink_to(target)
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        fill(tiers)
        assert all(map(tiers.tiers[0].check, range(10)))
    assert target.read_bytes() == b"precious"


@pytest.mark.skipif(UID != 0, reason="NOT TESTED: only root can give folders away")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / f"penstock-{UID}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(OptionError, match="belongs to user 12345"):
        open_tiers([Memory("1MB", folder=tmp_path)], SHAPE)
    assert list(theirs.iterdir()) == []


@pytest.mark.skipif(UID != 0, reason="NOT TESTED: only root can give folders away")
def test_users_of_one_scratch_disk_do_not_meet(tmp_path: Path) -> None:
    theirs = tmp_path / "penstock"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with open_tiers([Disk(tmp_path, "1MB")], SHAPE) as tiers:
        assert tiers.tiers[0].path == str(tmp_path / f"penstock-disk-{UID}" / SHAPE.name)
    assert list(theirs.iterdir()) == []


def test_file_systems_of_several_nodes_are_known(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    lines = "36 35 {} / /scratch rw,noatime master:1 - {} server:/x rw\n"
    answers = {}
    for kind in ("ext4", "nfs4", "lustre", "fuse.wekafs", "tmpfs"):
        mounts.write_text("broken line\n" + lines.format("0:1", "nfs") + lines.format(number, kind))
        answers[kind] = is_shared_by_nodes(descriptor, str(mounts))
    os.close(descriptor)
    assert [kind for kind, answer in answers.items() if answer] == ["nfs4", "lustre", "fuse.wekafs"]
    assert not is_shared_by_nodes(0, str(tmp_path / "no such file"))
