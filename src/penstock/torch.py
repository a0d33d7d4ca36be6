"""Penstock for PyTorch: the names that users need beside `penstock.Loader`.

Batches come from `penstock.Loader`, as tensors. This module has the pieces that PyTorch needs
beside that: a view for its DataLoader and torchdata's (`IterableDataset`), the world of a process
group or of a dimension of a device mesh (`world_of`), and resumption for trainers that save only
the number of a step (`seek`, `resume_callback`). For importance sampling it has the loss of a step
(`weighted_loss`, and `WeightedLossMixin` for Hugging Face's Trainer). `merge_profile` adds the
loader's work to a profile of torch.profiler. The code is in `penstock.loader.torch`.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.loader.torch.iterable import IterableDataset
    from penstock.loader.torch.observe import WeightedLossMixin, weighted_loss
    from penstock.loader.torch.profile import merge_profile
    from penstock.loader.torch.trainers import resume_callback, seek
    from penstock.loader.torch.world import world_of

__all__ = [
    "IterableDataset",
    "WeightedLossMixin",
    "merge_profile",
    "resume_callback",
    "seek",
    "weighted_loss",
    "world_of",
]

# torch and the front are imported when a name is first used.
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
    package="penstock.loader.torch",
)
