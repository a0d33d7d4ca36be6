"""Who asks for the next item: what a DataLoader or a trainer does to a data set shows only there.

A data set is not told the batch size of the DataLoader that reads it, nor that a trainer has put a
splitter between them. Both go wrong in silence: batches out of order, or half of all samples lost.
So the call stack is looked at, once an iteration, for the few callers that are known to do so.
"""

from __future__ import annotations

import sys
from types import FrameType

from penstock.errors import OptionError
from penstock.world import World

_SPLITTERS = ("IterableDatasetShard.", "DataLoaderDispatcher.")
"""Of Accelerate and Transformers: both give each rank a part of what one data set yields."""
_FRAMES_MAX = 200


def refuse_splitters(world: World) -> None:
    """Raise if what calls us splits a stream among ranks that is already one rank's share."""
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
    """Raise if torch's DataLoader asks for other batches than it will get; None: whole ones."""
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
