"""`penstock tiers`: lists what is ours, removes what nobody uses, touches nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Disk, Memory

Run = Callable[..., subprocess.CompletedProcess[str]]


def shape(name: str) -> TierShape:
    lengths = np.full(10, 10_000)
    about = {"uri": f"s3://bucket/{name}/"}
    return TierShape(name=name, offsets=np.cumsum(lengths) - lengths, lengths=lengths, about=about)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A disk tier that nobody uses, with a file of somebody else beside it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with open_tiers([Disk(folder, "1MB")], shape("kept")) as tiers:
        assert tiers.tiers[0].claim(0)
        assert tiers.tiers[0].write(0, os.urandom(10_000))
    (folder / "penstock" / "note").write_text("mine")
    return folder


def test_tiers_are_listed_with_where_what_and_whether(penstock: Run, kept: Path) -> None:
    with open_tiers([Memory("1MB", folder=kept)], shape("used")):
        answer = penstock("tiers", "--folder", kept)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert f"{kept}/penstock/kept" in answer.stdout
    assert "s3://bucket/kept/" in answer.stdout
    assert "not in use, last used" in answer.stdout
    assert "s3://bucket/used/" in answer.stdout
    assert "in use\n" in answer.stdout


def test_remove_takes_what_nobody_uses_and_nothing_else(penstock: Run, kept: Path) -> None:
    with open_tiers([Disk(kept, "1MB")], shape("used")) as tiers:
        answer = penstock("tiers", "--folder", kept, "--remove", "--json")
        assert Path(tiers.tiers[0].path, "data").exists()
    removed = {tier["name"]: tier["removed"] for tier in json.loads(answer.stdout)["tiers"]}
    assert (removed["kept"], removed["used"]) == (True, False)
    assert {path.name for path in (kept / "penstock").iterdir()} == {"note", "used"}


def test_no_tiers_are_no_error(penstock: Run, tmp_path: Path) -> None:
    answer = penstock("tiers", "--folder", tmp_path)
    assert answer.returncode == 0
    assert list(tmp_path.glob("penstock*")) == []


def test_a_folder_that_is_not_there_is_one(penstock: Run, tmp_path: Path) -> None:
    answer = penstock("tiers", "--folder", tmp_path / "nowhere")
    assert answer.returncode == 1
    assert "does not exist" in answer.stderr
