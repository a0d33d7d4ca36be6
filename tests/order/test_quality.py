"""Quality tells a good shuffle from a poor one."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import OptionError
from penstock.order import BlocksOrder, GlobalOrder, Quality, SequentialOrder, quality_of


def blocks_quality(window_blocks: int) -> Quality:
    starts = np.arange(0, 100_001, 100)
    order = BlocksOrder(block_starts=starts, seed=7, window_blocks=window_blocks)
    return quality_of(order, batch_size=200)


@pytest.mark.parametrize("num_samples", [100_000, 5_000_011, 2**40])
def test_a_global_order_looks_uniform(num_samples: int) -> None:
    quality = quality_of(GlobalOrder(num_samples=num_samples, seed=7), epoch=3, batch_size=256)
    assert quality.num_positions <= 10**6
    assert quality.mixing == pytest.approx(1, abs=0.01)
    assert quality.class_mix == pytest.approx(1, abs=0.01)
    assert quality.adjacent_rate < quality.adjacent_rate_uniform + 1e-4
    assert abs(quality.cell_z) < 4


def test_a_sequential_order_looks_as_bad_as_it_is() -> None:
    quality = quality_of(SequentialOrder(num_samples=100_000), batch_size=100)
    assert quality.mixing < 0.001
    assert quality.adjacent_rate == 1
    assert quality.class_mix < 0.02
    assert quality.cell_z > 1000


def test_wider_windows_mix_better() -> None:
    qualities = [blocks_quality(window_blocks) for window_blocks in (1, 4, 64, 1000)]
    mixings = [quality.mixing for quality in qualities]
    assert mixings == sorted(mixings)
    assert [q.class_mix for q in qualities] == sorted(q.class_mix for q in qualities)
    adjacent = [q.adjacent_rate for q in qualities]
    assert adjacent == sorted(adjacent, reverse=True)
    assert mixings[0] < 0.01
    assert mixings[3] == pytest.approx(1, abs=0.02)


def test_one_batch_of_everything_meets_every_class() -> None:
    quality = quality_of(GlobalOrder(num_samples=50, seed=7), batch_size=50, num_classes=7)
    assert quality.class_mix == 1
    assert quality.num_positions == 50


def test_the_figures_can_be_shown() -> None:
    quality = quality_of(SequentialOrder(num_samples=1000), batch_size=10)
    assert quality.show()["adjacent_rate"] == 1.0
    assert quality.show()["mixing"] == pytest.approx(quality.mixing, rel=1e-3)


def test_batches_without_neighbours_are_refused() -> None:
    for batch_size in (1, 11):
        with pytest.raises(OptionError, match="2 to 10"):
            quality_of(SequentialOrder(num_samples=10), batch_size=batch_size)
