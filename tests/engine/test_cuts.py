"""Places of ragged values in a buffer."""

import numpy as np
import pytest

from penstock.engine.cuts import Cuts


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([0, 2, 2], [2, 0, 3]), ([1, 4, 6], [2, -1, 1]), ([0], [-1])],
)
def test_a_split_by_sizes_gives_the_same_values_as_views(
    starts: list[int], lengths: list[int]
) -> None:
    buffer = np.arange(10, dtype=np.uint8)
    cuts = Cuts(buffer, np.array(starts), np.array(lengths))
    sizes, every = cuts.sizes()
    assert sum(sizes) == len(buffer)
    pieces = np.split(buffer, np.cumsum(sizes)[:-1])[every - 1 : -1 : every]
    views = cuts.arrays()
    assert len(pieces) == len(views)
    for piece, view in zip(pieces, views, strict=True):
        assert piece.tolist() == ([] if view is None else view.tolist())
    assert [view is None for view in views] == [length < 0 for length in lengths]
    assert cuts.nbytes == sum(max(0, length) for length in lengths)
