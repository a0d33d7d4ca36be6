"""Files of many samples never open as one blob each; the message says how they can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.errors import FormatError

WAYS_OUT = {
    "train.csv": "penstock pack",
    "train.tsv.gz": "to_parquet",
    "train.json": r"jq -c '\.\[\]'",
    "tokens.bin": r"np\.fromfile.*sequence_length=",
    "tokens.idx": "is an index",
    "model.pt": "never unpickled",
    "set.PKL": "never unpickled",
    "set.h5": r"penstock\.Writer",
    "x.tfrecord": r"penstock\.Writer",
    "images.zip": "unpack it",
}


@pytest.mark.parametrize(("name", "words"), WAYS_OUT.items())
def test_a_file_of_many_samples_is_refused_with_the_way_out(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    with pytest.raises(FormatError, match=rf"{name} .*{words}.*extensions="):
        penstock.open(tmp_path)
    with pytest.raises(FormatError, match=words):
        penstock.open(tmp_path, format="files")


def test_who_means_each_file_as_a_sample_says_so(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.json").write_text(json.dumps([number]))
        (tmp_path / f"{number}.pt").write_bytes(bytes([number]))
    assert [s["json"] for s in penstock.open(tmp_path, extensions=["json"])] == [[0], [1], [2]]
    assert penstock.open(tmp_path, extensions=["pt"])[2] == {"pt": b"\x02"}


def test_a_table_beside_media_is_not_a_sample(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("a,b\n")
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(b"RIFF")
    with pytest.raises(FormatError, match=r"1 of 4 objects.*extensions=\['wav'\]"):
        penstock.open(tmp_path)
    assert len(penstock.open(tmp_path, extensions=["wav"])) == 3


@pytest.mark.parametrize("name", ["a.wav", "a.mp4", "a.txt", "a.xml", "a.npz", "brain.nii.gz"])
def test_plain_media_and_documents_stay_samples(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert len(penstock.open(tmp_path)) == 1


@pytest.mark.parametrize("num_lines", [2, 2000])
def test_json_shards_of_streaming_are_refused_with_the_way_out(
    tmp_path: Path, num_lines: int
) -> None:
    """Whether the index or the shard is larger."""
    text = "".join(json.dumps({"x": i}) + "\n" for i in range(num_lines))
    (tmp_path / "shard.00000.json").write_text(text)
    shard = {
        "column_encodings": ["int"],
        "columns": {"x": "int"},
        "compression": None,
        "format": "json",
        "newline": "\n",
        "raw_data": {"basename": "shard.00000.json", "bytes": len(text), "hashes": {}},
        "raw_meta": {"basename": "shard.00000.json.meta", "bytes": 8, "hashes": {}},
        "samples": num_lines,
        "version": 2,
        "zip_data": None,
    }
    (tmp_path / "shard.00000.json.meta").write_bytes(bytes(8))
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    with pytest.raises(FormatError, match=r"named \.jsonl"):
        penstock.open(tmp_path)
    (tmp_path / "shard.00000.json").rename(tmp_path / "shard.00000.jsonl")
    assert len(penstock.open(tmp_path / "*.jsonl")) == num_lines


def test_keys_count_from_the_end_as_samples_do(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x")
    dataset = penstock.open(tmp_path)
    for view in (dataset, dataset[1:], dataset.select([2, 0])):
        keys = [view.key(i) for i in range(len(view))]
        assert [view.key(i - len(view)) for i in range(len(view))] == keys
        for i in (len(view), -len(view) - 1):
            with pytest.raises(IndexError, match=f"sample {i} of {len(view)}"):
                view.key(i)
