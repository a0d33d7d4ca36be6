"""Penstock: the array and the tar shards as they lie, one loader for all epochs."""

from collections.abc import Callable, Iterator
from pathlib import Path

# Batches are tensors: a training program has torch loaded before it opens anything.
import torch  # noqa: F401

import penstock
from benchmarks import under_test
from benchmarks.works import SEED, Work


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    batches = map(BATCH[work.name], iter(loader_of(work, folder, variant, epochs=None)))
    return lambda _: epoch_of(batches, work)


def loader_of(work: Work, folder: Path, variant: str, *, epochs: int | None) -> penstock.Loader:
    return penstock.Loader(
        penstock.open(folder / "tokens.npy" if work.name == "tokens" else folder),
        batch_size=work.batch_size,
        epochs=epochs,
        seed=SEED,
        shuffle="global",
        transform=resized if work.name == "jpeg" else None,
        **under_test.workers(variant),
    )


def epoch_of(batches: Iterator, work: Work) -> Iterator:
    """Yield the batches of an epoch. Tokens have an incomplete last one, which comes filled up."""
    for _ in range(work.num_samples // work.batch_size):
        yield next(batches)
    if over := work.num_samples % work.batch_size:
        yield next(batches)[:over]


def resized(sample: dict) -> dict:
    from benchmarks.images import resize

    return {"jpg": resize(sample["jpg"]), "cls": sample["cls"]}


BATCH = {
    "tokens": lambda batch: batch["data"],
    "blobs": lambda batch: (batch["bin"], batch["cls"]),
    "jpeg": lambda batch: (batch["jpg"], batch["cls"]),
}


class Stateful:
    """The loader's own state; this one hands out rows instead of batches with names."""

    def __init__(self, loader: penstock.Loader) -> None:
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.loader = loader

    def __iter__(self) -> Iterator:
        return map(BATCH["tokens"], self.loader)


def open_stateful(work: Work, folder: Path, variant: str) -> Stateful:
    return Stateful(loader_of(work, folder, variant, epochs=1))
