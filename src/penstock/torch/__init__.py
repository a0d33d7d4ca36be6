"""Penstock for PyTorch: the only room that knows torch.

Batches come from `penstock.Loader`, as tensors, with or without this room. Here is what torch's own
world asks for beside that: a view for its DataLoader and torchdata's (`IterableDataset`), the world
of a process group or of a dimension of a device mesh (`world_of`), and the way back to a step for
trainers that save nothing but its number (`seek`, `resume_callback`). Nothing here starts a process
group, and nothing reads or decodes: that is `loader`.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.torch.iterable import IterableDataset
    from penstock.torch.trainers import resume_callback, seek
    from penstock.torch.world import world_of

__all__ = ["IterableDataset", "resume_callback", "seek", "world_of"]

# A worker uses `tensors` only, not the front that the other modules import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "IterableDataset": "iterable",
        "resume_callback": "trainers",
        "seek": "trainers",
        "world_of": "world",
    },
)
