"""Penstock: every byte a training step waits for, early enough that nothing waits.

>>> import penstock
>>> dataset = penstock.open("s3://bucket/train/")  # doctest: +SKIP
>>> with penstock.Loader(dataset, batch_size=256, seed=7) as loader:  # doctest: +SKIP
...     for batch in loader:
...         train(batch)
"""

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.open import open
from penstock.dataset.pack import PackOptions, pack
from penstock.dataset.verify import verify
from penstock.dataset.writer import Writer
from penstock.loader import Batch, Loader, Stats
from penstock.storage.options import StoreOptions
from penstock.storage.tier_sizes import Disk, Memory
from penstock.world import World

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Dataset",
    "Disk",
    "Loader",
    "Memory",
    "Mixture",
    "PackOptions",
    "Stats",
    "StoreOptions",
    "World",
    "Writer",
    "open",
    "pack",
    "verify",
]
