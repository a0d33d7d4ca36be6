"""Hugging Face datasets: Arrow files, map style, whole batches of indices as its guide advises."""

import shutil
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

import datasets
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.works import ROW_LENGTH, Ragged, Work

LABELLED = {"data": datasets.Value("large_binary"), "label": datasets.Value("int64")}
FEATURES = {
    "tokens": {"data": datasets.List(datasets.Value("int32"), length=ROW_LENGTH)},
    "blobs": LABELLED,
    "jpeg": LABELLED,
}


def write(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    def samples() -> Iterator[dict]:
        for i in range(work.num_samples):
            data = source[i] if work.name == "tokens" else source[i].tobytes()
            yield {"data": data, "label": i} if work.has_label else {"data": data}

    features = datasets.Features(FEATURES[work.name])
    cache = str(folder / "cache")
    made = datasets.Dataset.from_generator(samples, features=features, cache_dir=cache)
    made.save_to_disk(str(folder / "set"))
    shutil.rmtree(cache)


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    samples = datasets.load_from_disk(str(folder / "set"))
    if work.name == "tokens":
        samples = samples.with_format("torch")
    elif work.name == "jpeg":
        samples = samples.with_transform(images)
    batches = BatchSampler(RandomSampler(samples), work.batch_size, drop_last=False)
    workers = int(variant.rpartition("w")[2])
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(samples, sampler=batches, batch_size=None, **options)
    take = itemgetter("data", "label") if work.has_label else itemgetter("data")
    return lambda _: map(take, loader)


def open_stateful(work: Work, folder: Path, variant: str) -> object:
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = datasets.load_from_disk(str(folder / "set")).with_format("torch")
    options = {"shuffle": True, "num_workers": int(variant.rpartition("w")[2]), "collate_fn": rows}
    return StatefulDataLoader(samples, work.batch_size, **options)


def rows(samples: list[dict]) -> torch.Tensor:
    return torch.stack([sample["data"] for sample in samples])


def images(batch: dict) -> dict:
    from benchmarks.images import decode

    return {"data": np.stack([decode(data) for data in batch["data"]]), "label": batch["label"]}
