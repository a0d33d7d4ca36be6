"""Fields that stay bytes have one type in every batch; what cannot be padded says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import DatasetError, OptionError

from .conftest import write_tar

BLOBS = [bytes([i]) * (i % 4) for i in range(12)]


@pytest.fixture
def shards(tmp_path: Path) -> penstock.Dataset:
    """Blobs of 0 to 3 bytes, half of them with a second one, texts and numbers in two tars."""
    for shard in range(2):
        samples = []
        for i in range(shard * 6, shard * 6 + 6):
            some = {"opt.bin": b"x"} if i % 2 else {}
            samples.append({"bin": BLOBS[i], "cls": b"%d" % i, "txt": b"no %d" % i, **some})
        write_tar(tmp_path / "shards" / f"{shard}.tar", samples, shard * 6)
    return penstock.open(tmp_path / "shards")


def identity(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def batch_of(dataset: penstock.Dataset, **options: Any) -> Any:
    with penstock.Loader(dataset, batch_size=12, shuffle=None, **options) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("decoded", [["bin"], ["bin", "opt.bin", "cls", "txt"]])
@pytest.mark.parametrize(
    ("output", "transform", "workers"),
    [
        ("numpy", None, "here"),
        ("numpy", identity, "here"),
        ("torch", None, "here"),
        ("torch", identity, "here"),
        ("numpy", None, 1),
    ],
)
def test_raw_fields_have_one_type_whatever_becomes_of_the_others(
    shards: penstock.Dataset, output: str, decoded: list[str], transform: Any, workers: Any
) -> None:
    if output == "torch":
        pytest.importorskip("torch")
    raw = shards.with_decoders(dict.fromkeys(decoded))
    options: dict[str, Any] = {"output": output, "transform": transform, "workers": workers}
    batch = batch_of(raw, threads=1, **options)
    kinds = {"numpy": "numpy.uint8", "torch": "torch.uint8"}
    for name, expected in (
        ("bin", BLOBS),
        ("opt.bin", [b"x" if i % 2 else None for i in range(12)]),
    ):
        values = [None if v is None else np.asarray(v).tobytes() for v in batch[name]]
        assert values == expected
        present = [v for v in batch[name] if v is not None]
        assert {str(getattr(v, "dtype", type(v))) for v in present} <= {kinds[output], "uint8"}
        for v in present:
            v[...] = 0  # A batch's memory is the user's own.


def test_bytes_of_one_length_are_a_list_too(tmp_path: Path) -> None:
    write_tar(tmp_path / "d" / "a.tar", [{"bin": b"abc", "cls": b"1"}] * 4)
    dataset = penstock.open(tmp_path / "d")
    for decoders in ({}, {"cls": None}):
        batch = next(iter(penstock.Loader(dataset.with_decoders(decoders), batch_size=4)))
        assert isinstance(batch["bin"], list), "as it is where lengths differ"
        assert len(batch["bin"]) == 4


def test_bytes_can_be_padded(shards: penstock.Dataset) -> None:
    batch = batch_of(shards, pad={"bin": 255}, output="numpy")
    assert batch["bin"].shape == (12, 3)
    assert batch["bin"][5].tolist() == [5, 255, 255]


@pytest.mark.parametrize(
    ("pad", "transform", "message"),
    [
        ({"txt": 0}, None, r"'txt' cannot be padded.*str.*lists of numbers"),
        ({"opt.bin": 0}, None, r"'opt.bin' cannot be padded: it has no value in one sample"),
        ({"bin": -1}, None, r"'bin': -1.*holds uint8 numbers"),
        ({"bin": 0.5}, None, r"'bin': 0.5.*holds uint8 numbers"),
        ({"bin": 256}, None, r"'bin': 256.*holds uint8 numbers"),
        ({"x": 0}, lambda s: {"x": {"a": 1}}, r"'x' cannot be padded.*dict"),
        ({"x": 0}, lambda s: {"x": [[1], [1, 2]]}, r"'x' cannot be padded.*list"),
        ({"x": 0}, lambda s: {"x": np.zeros([1] * (s["cls"] % 2 + 1))}, r"\[1, 2\] axes"),
    ],
)
def test_what_cannot_be_padded_says_so(
    shards: penstock.Dataset, pad: dict[str, Any], transform: Any, message: str
) -> None:
    with pytest.raises((DatasetError, OptionError), match=message):
        batch_of(shards, pad=pad, transform=transform, output="numpy")
