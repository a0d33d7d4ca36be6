"""The loader: bytes into batches, ahead of the training loop.

Dull on purpose: what comes when is decided in `order`, where it lies in `dataset`. Here are the
threads that read (`reads`, `staging`), the ways to make a batch (`gather` for rows of arrays, `raw`
for bytes, `decode` for the rest) and the runner that keeps them busy. Start with `loader.Loader`.
"""

from penstock.loader.batch import Batch
from penstock.loader.loader import Loader
from penstock.loader.stats import SourceStats, Stats

__all__ = ["Batch", "Loader", "SourceStats", "Stats"]
