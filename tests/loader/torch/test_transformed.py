"""What becomes of what a transform returns: tensors, numbers, images, nested values."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import penstock
from penstock.engine.shared import SharedPool, SharedSegments, packed
from penstock.errors import OptionError
from penstock.torch import IterableDataset

EXOTIC = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
KNOWN = [torch.float32, torch.float16, torch.uint8, torch.uint16, torch.int64, torch.bool]


def first(dataset: penstock.Dataset, transform: Callable[..., Any], **options: Any) -> Any:
    loader = penstock.Loader(dataset, batch_size=8, shuffle=None, transform=transform, **options)
    with loader:
        return next(iter(loader))


def as_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.from_numpy(sample["data"].copy()).float() / 2, "y": torch.tensor(1)}


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["data"][0])
    return {"x": torch.full((number % 3 + 1, 2), number, dtype=torch.bfloat16)}


def test_tensors_of_one_shape_become_one_tensor(dataset: penstock.Dataset) -> None:
    batch = first(dataset, as_tensor)
    assert batch["x"].dtype == torch.float32
    assert batch["x"].tolist() == [[i / 2] * 3 for i in range(8)]
    assert batch["y"].tolist() == [1] * 8


@pytest.mark.parametrize("kind", [*KNOWN, *EXOTIC], ids=str)
def test_tensors_of_any_type_are_stacked(dataset: penstock.Dataset, kind: torch.dtype) -> None:
    def transform(sample: dict[str, Any]) -> torch.Tensor:
        return torch.from_numpy(sample["data"] % 2).to(torch.float32).to(kind)

    batch = first(dataset, transform)
    assert batch["data"].dtype == kind
    assert batch["data"].shape == (8, 3)
    assert batch["data"].to(torch.complex64).real.int().tolist() == [[i % 2] * 3 for i in range(8)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_tensors_are_a_list_or_padded(dataset: penstock.Dataset, kind: torch.dtype) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": ragged(sample)["x"].to(kind)}

    batch = first(dataset, transform)
    assert [tuple(x.shape) for x in batch["x"]] == [(i % 3 + 1, 2) for i in range(8)]
    assert all(isinstance(x, torch.Tensor) and x.dtype == kind for x in batch["x"])
    padded = first(dataset, transform, pad={"x": -1})["x"]
    assert (padded.dtype, tuple(padded.shape)) == (kind, (8, 3, 2))
    assert padded[4].tolist() == [[4, 4], [4, 4], [-1, -1]]


def test_views_of_all_kinds_keep_their_values(dataset: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        x = torch.from_numpy(sample["data"].copy())
        grid = torch.stack([x, x + 1])
        return {
            "transposed": grid.T,
            "expanded": x[:1].expand(4),
            "conjugate": torch.complex(x.float(), x.float()).conj(),
            "part": grid[1:, 1:],
        }

    batch = first(dataset, transform)
    assert batch["transposed"][5].tolist() == [[5, 6]] * 3
    assert batch["expanded"][5].tolist() == [5] * 4
    assert batch["conjugate"][5].tolist() == [5 - 5j] * 3
    assert batch["part"][5].tolist() == [[6, 6]]


def test_tensors_are_arrays_where_arrays_are_asked_for(dataset: penstock.Dataset) -> None:
    batch = first(dataset, as_tensor, output="numpy")
    assert isinstance(batch["x"], np.ndarray)
    assert batch["x"].dtype == np.float32
    lists = first(dataset, lambda s: {"x": ragged(s)["x"].float()}, output="numpy")
    assert all(isinstance(x, np.ndarray) for x in lists["x"])
    bfloat16 = first(dataset, lambda s: as_tensor(s)["x"].bfloat16(), output="numpy")
    assert bfloat16["data"].dtype == torch.bfloat16, "NumPy has no such type"


class Picture(torch.Tensor):
    """A tensor of a class of its own, as torchvision's tv_tensors are."""


def test_tensors_of_other_classes_become_plain_ones(dataset: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": as_tensor(sample)["x"].as_subclass(Picture)}

    assert type(first(dataset, transform)["x"]) is torch.Tensor


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_torchvisions_compose_on_a_sample_is_stacked(tmp_path: Path, output: str) -> None:
    pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    np.save(tmp_path / "images.npy", np.arange(8 * 6 * 5 * 3, dtype=np.uint8).reshape(8, 6, 5, 3))
    steps = [v2.ToImage(), v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)]
    dataset = penstock.open(tmp_path / "images.npy")
    batch = first(dataset, v2.Compose(steps), output=output)
    assert batch["data"].shape == (8, 3, 6, 5)
    expected = np.moveaxis(np.stack([s["data"] for s in dataset]), -1, 1)[..., ::-1] / 255
    assert np.allclose(np.asarray(batch["data"]), expected)


def test_images_of_pillow_become_arrays(dataset: penstock.Dataset) -> None:
    image = pytest.importorskip("PIL.Image")

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": image.new("RGB", (4, 2), (int(sample["data"][0]), 0, 0))}

    batch = first(dataset, transform)
    assert (batch["image"].dtype, tuple(batch["image"].shape)) == (torch.uint8, (8, 2, 4, 3))
    assert batch["image"][:, 0, 0, 0].tolist() == list(range(8))


def test_numbers_become_tensors_as_wide_as_they_need(dataset: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["data"][0])
        large = 2**63 + number if number else -1
        return {"int": number, "bool": number > 3, "float": number / 2, "large": large}

    batch = first(dataset, transform)
    types = [batch[name].dtype for name in ("int", "bool", "float")]
    assert types == [torch.int64, torch.bool, torch.float64]
    assert batch["large"] == [-1] + [2**63 + i for i in range(1, 8)], "no type holds both"


def test_nested_values_stay_one_entry_a_sample(dataset: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        x = as_tensor(sample)["x"]
        return {"target": {"boxes": x, "label": 1}, "views": (x, x + 1), "tokens": [1, 2]}

    batch = first(dataset, transform)
    assert batch["target"][5]["boxes"].tolist() == [2.5] * 3
    assert batch["views"][5][1].tolist() == [3.5] * 3
    assert batch["tokens"] == [[1, 2]] * 8
    moved = batch.to("meta")
    inside = [moved["target"][5]["boxes"], *moved["views"][5]]
    assert [x.device.type for x in inside] == ["meta"] * 3
    assert first(dataset, transform, pad={"tokens": 0}, look_ahead=10**6)["tokens"].shape == (8, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.to("meta"), r"'x'.*on meta.*CPU.*batch\.to"),
        (lambda x: x.requires_grad_(), r"'x'.*requires grad.*detach\(\)"),
    ],
)
def test_tensors_that_cannot_be_in_a_batch_are_refused(
    dataset: penstock.Dataset, wrong: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        first(dataset, lambda s: {"x": wrong(as_tensor(s)["x"])})


def both(sample: dict[str, Any]) -> dict[str, Any]:
    return {**as_tensor(sample), "ragged": ragged(sample)["x"]}


def test_worker_processes_return_tensors_too(dataset: penstock.Dataset) -> None:
    batch = first(dataset, both, pad={"ragged": 0}, workers=1)
    assert batch["x"].tolist() == first(dataset, as_tensor)["x"].tolist()
    assert (batch["ragged"].dtype, batch["ragged"].shape) == (torch.bfloat16, (8, 3, 2))


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    numbers = [torch.rand(()).item(), random.random(), np.random.rand()]
    return {"drawn": np.array(numbers)}


def test_worker_processes_draw_the_same_numbers_for_a_sample_in_every_run(
    dataset: penstock.Dataset,
) -> None:
    options: dict[str, Any] = {"transform": drawn, "workers": 1}
    batch = next(iter(penstock.Loader(dataset, batch_size=16, seed=7, **options)))
    again = next(iter(penstock.Loader(dataset[:], batch_size=8, seed=7, **options)))
    assert torch.equal(batch["drawn"][:8], again["drawn"])
    assert (batch["drawn"].unique(dim=0)).shape == (16, 3)


def test_a_part_of_a_tensor_travels_without_the_rest() -> None:
    whole = torch.arange(10**6, dtype=torch.float32).bfloat16()
    pool = SharedPool(1 << 20, SharedSegments())
    sent = packed([{"x": whole[5:7], "y": (whole[:2].float(), "text")}], pool)
    assert len(sent.data) < 10_000
    assert sent.references == []
    (sample,) = pickle.loads(sent.data)
    assert torch.equal(sample["x"], whole[5:7])
    assert torch.equal(sample["y"][0], whole[:2].float())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tensors_are_stacked_in_a_dataloader(dataset: penstock.Dataset, num_workers: int) -> None:
    view = IterableDataset(dataset, batch_size=8, shuffle=None, transform=as_tensor)
    batch = next(iter(DataLoader(view, batch_size=None, num_workers=num_workers)))
    assert batch["x"].tolist() == [[i / 2] * 3 for i in range(8)]
