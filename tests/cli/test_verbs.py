"""index, info, order, pack and verify on a small data set."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as library
from penstock.order import GlobalOrder

Run = Callable[..., subprocess.CompletedProcess[str]]


def json_of(answer: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert answer.returncode == code, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def test_index_makes_a_version_and_then_is_up_to_date(penstock: Run, shards: Path) -> None:
    first = json_of(penstock("index", shards, "--json"))
    assert (first["new"], first["version"], first["num_samples"]) == (True, 1, 40)
    assert first["num_objects"] == 2
    second = json_of(penstock("index", shards, "--json"))
    assert (second["new"], second["version"]) == (False, 1)
    assert "up to date" in penstock("index", shards).stdout


def test_new_objects_become_a_new_version(
    penstock: Run, shards: Path, add_shard: Callable[[], None]
) -> None:
    assert penstock("index", shards, "--check").returncode == 1
    penstock("index", shards)
    assert penstock("index", shards, "--check").returncode == 0
    add_shard()
    check = json_of(penstock("index", shards, "--check", "--json"), code=1)
    assert check["new"] == ["train-2.tar"]
    assert "penstock: warning:" in penstock("info", shards).stderr
    again = json_of(penstock("index", shards, "--json"))
    assert (again["new"], again["version"], again["num_samples"]) == (True, 2, 60)
    assert json_of(penstock("info", shards, "--version", 1, "--json"))["num_samples"] == 40


def test_rebuild_makes_a_version_of_changed_objects(penstock: Run, shards: Path) -> None:
    penstock("index", shards)
    (shards / "train-1.tar").write_bytes((shards / "train-0.tar").read_bytes() + bytes(512))
    refused = penstock("index", shards)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "train-1.tar" in refused.stderr
    assert json_of(penstock("index", shards, "--rebuild", "--json"))["version"] == 2


def test_info_shows_what_is_there(penstock: Run, shards: Path) -> None:
    shown = penstock("info", shards).stdout
    for word in ("40", "2 tar", "txt", "cls", "fingerprint", "00000", '"sample number 0', "█"):
        assert word in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "/" not in line)


def test_info_for_programs(penstock: Run, shards: Path) -> None:
    result = json_of(penstock("info", shards, "--json", "--samples", 2))
    dataset = library.open(shards)
    assert result["fingerprint"] == dataset.fingerprint
    assert [f["name"] for f in result["fields"]] == list(dataset.fields)
    assert [s["id"] for s in result["samples"]] == [0, 39]
    assert result["versions"] == [1]


def test_info_takes_several_names_and_an_index(penstock: Run, shards: Path) -> None:
    named = sorted(shards.glob("*.tar"))
    assert json_of(penstock("info", *named, "--json"))["num_samples"] == 40
    penstock("index", shards)
    version = shards / ".penstock" / "all" / "v000001.json"
    assert json_of(penstock("info", version, "--json"))["num_samples"] == 40


def test_order_says_what_the_loader_will_do(penstock: Run, shards: Path) -> None:
    words = ("order", shards, "--seed", 7, "--epoch", 2, "--json")
    result = json_of(penstock(*words, "--at", 5, "--count", 10))
    order = GlobalOrder(num_samples=40, seed=7)
    assert result["ids"] == order.ids(2, 5, 15).tolist()
    where = json_of(penstock(*words, "--where", result["ids"][0]))
    assert where["positions"] == {str(result["ids"][0]): 5}
    loader = library.Loader(library.open(shards), batch_size=40, seed=7, output="numpy")
    with loader:
        loader.set_epoch(2)
        batch = next(iter(loader))
    assert np.array_equal(batch.ids[5:15], result["ids"])


def test_order_compares_shuffles(penstock: Run, shards: Path) -> None:
    quality = json_of(penstock("order", shards, "--quality", "--json"))["quality"]
    assert list(quality) == ["global", "blocks", "sequential"]
    assert quality["sequential"]["adjacent_rate"] == 1
    assert "mixing" in penstock("order", shards, "--quality").stdout


def test_positions_outside_an_epoch_are_refused(penstock: Run, shards: Path) -> None:
    answer = penstock("order", shards, "--at", 40)
    assert answer.returncode == 1
    assert "0 to 39" in answer.stderr


def test_what_was_packed_is_sound_until_it_is_damaged(
    penstock: Run, shards: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    made = json_of(penstock("pack", shards, packed, "--shard-size", "20kB", "--json"))
    assert (made["num_samples"], made["version"]) == (40, 1)
    assert made["num_shards"] > 1
    checked = json_of(penstock("verify", packed, "--json"))
    assert (checked["ok"], checked["num_samples"], checked["num_checksums"]) == (True, 40, 40)
    shard = sorted(packed.glob("*.tar"))[0]
    data = bytearray(shard.read_bytes())
    data[520:530] = b"##########"
    shard.write_bytes(data)
    damaged = json_of(penstock("verify", packed, "--json"), code=1)
    assert not damaged["ok"]
    assert any(p["kind"] == "checksum" for p in damaged["problems"])
    assert "problem" in penstock("verify", packed).stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["info", "nowhere"], "nowhere"),
        (["info", "SHARDS", "--format", "mds"], "mds"),
        (["info", "SHARDS", "--format", "cpio"], "there is no format 'cpio'"),
        (["info", "SHARDS", "--option", "colour=red"], "'colour'"),
        (["info", "SHARDS", "--option", "colour"], "--option colour=VALUE"),
        (["info", "SHARDS", "--version", "9"], "9"),
        (["pack", "SHARDS", "SHARDS"], "SHARDS"),
        (["info", "s3://bucket/x/", "--endpoint", "localhost"], "http://"),
        (["info", "s3://bucket/x/", "--anonymous", "--profile", "p"], "exclude each other"),
    ],
)
def test_errors_are_sentences(penstock: Run, shards: Path, words: list[str], hint: str) -> None:
    answer = penstock(*[w.replace("SHARDS", str(shards)) for w in words])
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("penstock: error: ")
    assert hint.replace("SHARDS", str(shards)) in answer.stderr
    assert "Traceback" not in answer.stderr


def test_debug_shows_the_traceback(penstock: Run) -> None:
    for words in (("info", "nowhere", "--debug"), ("--debug", "info", "nowhere")):
        answer = penstock(*words)
        assert answer.returncode == 1
        assert "Traceback" in answer.stderr
