"""Checks of the code that iterates over a data set, by its call stack.

A data set does not know the batch size of the DataLoader that reads it, nor whether a trainer has
put a splitter between them. Both go wrong silently: batches out of order, or half of all samples
lost. So once an iteration the call stack is searched for the few callers that are known to do so.
"""

from __future__ import annotations

import sys
from types import FrameType

from penstock.errors import OptionError
from penstock.world import World

_SPLITTERS = ("IterableDatasetShard.", "DataLoaderDispatcher.")
"""Classes of Accelerate and Transformers that give each rank a part of what a data set yields."""
_FRAMES_MAX = 200


def refuse_splitters(world: World) -> None:
    """Raise if a caller would split this rank's share among all ranks once more."""
    if world.num_ranks == 1:
        return
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return
        name = frame.f_code.co_qualname
        if name.startswith(_SPLITTERS):
            raise OptionError(
                f"this is the share of rank {world.rank} of {world.num_ranks}, and accelerate's "
                f"{name.partition('.')[0]} would split it among {world.num_ranks} ranks once more: "
                "most samples would be lost. Do not prepare() its DataLoader (penstock.Loader may "
                "be: it is left alone), or give the data set world=penstock.World() and let "
                "accelerate split"
            )
        frame = frame.f_back


def check_batch_size(caller: FrameType, expected: int | None) -> None:
    """Raise if torch's DataLoader expects another batch size; `expected` is None for batches."""
    if caller.f_code.co_qualname != "_IterableDatasetFetcher.fetch":
        return
    fetcher, index = caller.f_locals["self"], caller.f_locals["possibly_batched_index"]
    asked = len(index) if fetcher.auto_collation else None
    if asked == expected:
        return
    if expected is None:
        raise OptionError(
            f"this data set yields whole batches, and the DataLoader has batch_size={asked}: "
            "give it batch_size=None, or the data set samples=True"
        )
    raise OptionError(
        f"this data set deals out runs of {expected} samples, and the DataLoader has "
        f"batch_size={asked}: give both the same batch_size, or workers mix up their order"
    )
