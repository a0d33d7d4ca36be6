"""The loader: the part of the data path that lives in the training process.

`Loader` takes the user's options, lets `engine` make the batches, and hands them over. `order`
decides which sample comes when, `dataset` knows where it lies. `torch` holds the pieces that
PyTorch needs beside the loader, `dlio` the plug-in for DLIO.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.loader.batch import Batch
    from penstock.loader.loader import Loader

__all__ = ["Batch", "Loader"]

# Engine and workers import modules of `loader.torch`, and need nothing of the front.
__getattr__, __dir__ = lazy_names(__name__, {"Batch": "batch", "Loader": "loader"})
