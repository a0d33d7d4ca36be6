"""Penstock for PyTorch: the only room that knows torch.

Batches come from `penstock.Loader`, as tensors, with or without this room. Here is what torch's own
world asks for beside that: a view for its DataLoader and torchdata's (`IterableDataset`), the world
of a process group or of a dimension of a device mesh (`world_of`), and the way back to a step for
trainers that save nothing but its number (`seek`, `resume_callback`). For importance sampling there
is the loss of a step (`weighted_loss`, and `WeightedLossMixin` for Hugging Face's Trainer).
`merge_profile` adds the loader's work to a profile of torch.profiler. Nothing here starts a process
group, and nothing reads or decodes: that is `loader`.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.torch.iterable import IterableDataset
    from penstock.torch.observe import WeightedLossMixin, weighted_loss
    from penstock.torch.profile import merge_profile
    from penstock.torch.trainers import resume_callback, seek
    from penstock.torch.world import world_of

__all__ = [
    "IterableDataset",
    "WeightedLossMixin",
    "merge_profile",
    "resume_callback",
    "seek",
    "weighted_loss",
    "world_of",
]

# A worker uses `tensors` only, not the front that the other modules import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "IterableDataset": "iterable",
        "WeightedLossMixin": "observe",
        "merge_profile": "profile",
        "resume_callback": "trainers",
        "seek": "trainers",
        "weighted_loss": "observe",
        "world_of": "world",
    },
)
