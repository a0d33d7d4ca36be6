"""Which samples the demo trains on; the story has to know as well as the training processes."""

from __future__ import annotations

import numpy as np

from penstock.dataset.dataset import Dataset

_EVERY = 10


def split(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return the samples to train on and every tenth, which is held out; both are views."""
    is_held_out = np.arange(len(dataset)) % _EVERY == 0
    return dataset.select(~is_held_out), dataset.select(is_held_out)
