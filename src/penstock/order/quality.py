"""How well an order shuffles, measured against a uniform permutation.

Four views, because a bad shuffle hides from any single one: how far apart in the data set the
neighbours in a batch are, how many were stored side by side, how many runs of the data set
(classes, when it is stored class by class) meet in a batch, and whether the place in the epoch
tells anything about the place in the data set. Each has the value of a uniform permutation beside
it or divided out. Ids of a mixture count through its sources, so there these figures depend on the
weights as well.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.keys import Ids
from penstock.order.orders import Order

_POSITIONS_MAX = 10**6
_RUNS_MAX = 64
_CELLS_MAX = 32
_PER_CELL_MIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How an order compares with a uniform permutation in one epoch."""

    num_positions: int
    """Positions looked at."""
    mixing: float
    """Mean distance between neighbours in a batch; a uniform permutation has 1."""
    adjacent_rate: float
    """Share of neighbours that are also neighbours in the data set."""
    adjacent_rate_uniform: float
    """The same for a uniform permutation."""
    class_mix: float
    """Distinct classes in a batch; a uniform permutation has 1."""
    cell_z: float
    """Deviations by which positions tell about ids (chi-square); uniform lies within about ±3."""

    def show(self) -> dict[str, float]:
        """Return the figures by name, rounded for reading."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}


def quality_of(
    order: Order, *, epoch: int = 0, batch_size: int, num_classes: int = 1000
) -> Quality:
    """Return the quality of an order in an epoch.

    Large epochs are sampled: runs of whole batches, evenly spread, about a million positions.

    >>> from penstock.order.orders import SequentialOrder
    >>> quality = quality_of(SequentialOrder(num_samples=10_000), batch_size=100)
    >>> quality.adjacent_rate, quality.show()["mixing"], quality.show()["class_mix"]
    (1.0, 0.0003, 0.1045)
    """
    num_samples = order.num_samples
    if not 2 <= batch_size <= num_samples:
        raise OptionError(
            f"quality needs batches of 2 to {num_samples} samples, got {batch_size} samples"
        )
    starts, batches = _batches(order, epoch, batch_size)
    distances = np.abs(np.diff(batches, axis=1))
    uniform_distance = (num_samples**2 - 1) / (3 * num_samples)
    classes = min(num_classes, num_samples)
    return Quality(
        num_positions=batches.size,
        mixing=float(distances.mean()) / uniform_distance,
        adjacent_rate=float((distances == 1).mean()),
        adjacent_rate_uniform=2 / num_samples,
        class_mix=_distinct_classes(batches, classes, num_samples)
        / _distinct_classes_uniform(classes, num_samples, batch_size),
        cell_z=_cell_z(starts, batches, num_samples),
    )


def _batches(order: Order, epoch: int, batch_size: int) -> tuple[Ids, Ids]:
    """Return the first position of each batch looked at, and the ids of those batches as rows."""
    num_batches = order.num_samples // batch_size
    if num_batches * batch_size <= _POSITIONS_MAX:
        runs, run_batches = 1, num_batches
    else:
        runs = min(_RUNS_MAX, max(_POSITIONS_MAX // batch_size, 1))
        run_batches = max(_POSITIONS_MAX // (batch_size * runs), 1)
    firsts = [run * num_batches // runs for run in range(runs)]
    starts = np.concatenate([np.arange(first, first + run_batches) for first in firsts])
    ids = [
        order.ids(epoch, first * batch_size, (first + run_batches) * batch_size) for first in firsts
    ]
    return starts * batch_size, np.concatenate(ids).reshape(-1, batch_size)


def _distinct_classes(batches: Ids, num_classes: int, num_samples: int) -> float:
    classes = np.sort(_scaled(batches, num_classes, num_samples), axis=1)
    return float(1 + (np.diff(classes, axis=1) != 0).sum(axis=1).mean())


def _distinct_classes_uniform(num_classes: int, num_samples: int, batch_size: int) -> float:
    """Return how many classes a batch drawn without replacement meets on average."""
    edges = [-(-part * num_samples // num_classes) for part in range(num_classes + 1)]
    sizes, counts = np.unique(np.diff(edges), return_counts=True)
    missed = (_chance_missed(int(size), num_samples, batch_size) for size in sizes)
    return sum(int(count) * (1 - miss) for count, miss in zip(counts, missed, strict=True))


def _chance_missed(class_size: int, num_samples: int, batch_size: int) -> float:
    rest = num_samples - class_size
    if rest < batch_size:
        return 0.0
    logs = (math.lgamma(rest + 1), -math.lgamma(rest - batch_size + 1),
            math.lgamma(num_samples - batch_size + 1), -math.lgamma(num_samples + 1))  # fmt: skip
    return math.exp(math.fsum(logs))


def _cell_z(starts: Ids, batches: Ids, num_samples: int) -> float:
    """Return the z-score of the chi-square of position cells against id cells."""
    cells = min(_CELLS_MAX, math.isqrt(batches.size // _PER_CELL_MIN))
    if cells < 2:
        return 0.0
    positions = (starts[:, np.newaxis] + np.arange(batches.shape[1])).ravel()
    rows = _scaled(positions, cells, num_samples)
    columns = _scaled(batches.ravel(), cells, num_samples)
    counts = np.bincount(rows * cells + columns, minlength=cells * cells).reshape(cells, cells)
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True) / counts.sum()
    seen = expected > 0
    chi_square = float((((counts - expected) ** 2)[seen] / expected[seen]).sum())
    freedom = (np.count_nonzero(expected.any(axis=1)) - 1) * (
        np.count_nonzero(expected.any(axis=0)) - 1
    )
    return (chi_square - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


def _scaled(values: Ids, num_cells: int, num_samples: int) -> npt.NDArray[np.int64]:
    # Cells of equal width; the values are divided first where the product would not fit.
    if num_samples < 2**63 // num_cells:
        return values * num_cells // num_samples
    return np.minimum(values // (num_samples // num_cells), num_cells - 1)
