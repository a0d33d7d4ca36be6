"""Penstock: every byte a training step waits for, early enough that nothing waits.

>>> import penstock
>>> dataset = penstock.open("s3://bucket/train/")  # doctest: +SKIP
>>> with penstock.Loader(dataset, batch_size=256, seed=7) as loader:  # doctest: +SKIP
...     for batch in loader:
...         train(batch)
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.dataset.dataset import Dataset
    from penstock.dataset.mixture import Mixture
    from penstock.dataset.open import open
    from penstock.dataset.pack import PackOptions, pack
    from penstock.dataset.verify import verify
    from penstock.dataset.writer import Writer
    from penstock.engine.stats import Stats
    from penstock.loader import Batch, Loader
    from penstock.order.importance import Importance
    from penstock.storage.options import StoreOptions
    from penstock.storage.tier_sizes import Disk, Memory
    from penstock.world import World

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Dataset",
    "Disk",
    "Importance",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Batch": "loader.batch",
        "Dataset": "dataset.dataset",
        "Disk": "storage.tier_sizes",
        "Importance": "order.importance.options",
        "Loader": "loader.loader",
        "Memory": "storage.tier_sizes",
        "Mixture": "dataset.mixture",
        "PackOptions": "dataset.pack_options",
        "Stats": "engine.stats",
        "StoreOptions": "storage.options",
        "World": "world",
        "Writer": "dataset.writer",
        "open": "dataset.open",
        "pack": "dataset.pack",
        "verify": "dataset.verify",
    },
)
