"""Messages between front and engine."""

import pickle

import numpy as np
import pytest

from penstock.engine.job import BatchSlot
from penstock.engine.messages import PackedSlots


def slot(step: int, num_samples: int, *, has_weights: bool) -> BatchSlot:
    ids = np.arange(step, step + num_samples)
    return BatchSlot(
        epoch=1,
        step=step,
        ids=ids,
        positions=ids + 100,
        mask=ids % 2 == 0,
        num_counted=num_samples - 1,
        cursor_after=(1, step + num_samples),
        weights=np.float32(ids) if has_weights else None,
        digest=2**64 - 1,
    )


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("sizes", [[3], [3, 0, 2]])
def test_slots_arrive_as_they_were(sizes: list[int], has_weights: bool) -> None:
    slots = [slot(step, size, has_weights=has_weights) for step, size in enumerate(sizes)]
    found = pickle.loads(pickle.dumps(PackedSlots.of(slots), 5)).slots()
    assert len(found) == len(slots)
    for a, b in zip(slots, found, strict=True):
        for name in BatchSlot.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
