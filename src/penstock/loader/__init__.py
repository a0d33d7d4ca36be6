"""The loader: the part of the data path that lives in the training process.

`Loader` takes what a user asks for, has `engine` make the batches, and hands them over. What comes
when is decided in `order`, where it lies in `dataset`.
"""

from penstock.engine.stats import SourceStats, Stats
from penstock.loader.batch import Batch
from penstock.loader.loader import Loader

__all__ = ["Batch", "Loader", "SourceStats", "Stats"]
