"""Penstock: the array and the tar shards as they lie, one loader for all epochs."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import penstock
from benchmarks.works import SEED, Work


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    samples = penstock.open(folder / "tokens.npy" if work.name == "tokens" else folder)
    loader = penstock.Loader(
        samples,
        batch_size=work.batch_size,
        epochs=None,
        seed=SEED,
        shuffle=variant,
        transform=resized if work.name == "jpeg" else None,
    )
    batches = map(BATCH[work.name], loader.__enter__())
    return lambda _: islice(batches, work.num_batches)


def resized(sample: dict) -> dict:
    from benchmarks.images import resize

    return {"jpg": resize(sample["jpg"]), "cls": sample["cls"]}


BATCH = {
    "tokens": lambda batch: batch["data"],
    "blobs": lambda batch: batch["bin"],
    "jpeg": lambda batch: (batch["jpg"], batch["cls"]),
}
