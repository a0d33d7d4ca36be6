"""WebDataset: tar shards in a random order, a shuffle buffer, batches made inside the pipeline."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset as wds

from benchmarks.formats import shards_in
from benchmarks.peers.torch import listed
from benchmarks.works import SEED, Work

BUFFER_SAMPLES = 1000


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    shards = shards_in(folder)
    samples = wds.WebDataset(shards, shardshuffle=len(shards), detshuffle=True, seed=SEED)
    samples = samples.shuffle(BUFFER_SAMPLES)
    samples = samples.map({"tokens": row, "blobs": blob, "jpeg": image}[work.name])
    batches = samples.batched(work.batch_size, collation_fn=COLLATE[work.name], partial=True)
    workers = int(variant[1:])
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = wds.WebLoader(batches, batch_size=None, **options)
    return lambda _: iter(loader)


def row(sample: dict) -> bytes:
    return sample["bin"]


def blob(sample: dict) -> tuple[bytes, int]:
    return sample["bin"], int(sample["cls"])


def image(sample: dict) -> tuple[np.ndarray, int]:
    from benchmarks.images import decode

    return decode(sample["jpg"]), int(sample["cls"])


def rows(samples: list[bytes]) -> torch.Tensor:
    joined = bytearray(b"".join(samples))
    return torch.frombuffer(joined, dtype=torch.int32).view(len(samples), -1)


def images(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


COLLATE = {"tokens": rows, "blobs": listed, "jpeg": images}
