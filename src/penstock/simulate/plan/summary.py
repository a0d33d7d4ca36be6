"""The summary of a data set: the few numbers that a plan needs.

It is made from the index without a table of units or samples: rows at even distances are counted in
closed form, others are counted piece by piece. So a billion samples need the memory of a million.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints, Table
from penstock.errors import OptionError
from penstock.flow.layout.cuts import Chosen, EvenRuns, cut_table, runs_of
from penstock.flow.layout.units import chosen_by_part

NUM_CLASSES = 64
"""Sizes fall into classes of powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The number of samples and units, and the sizes of units."""

    num_samples: int
    num_reads: int
    """Reads of all samples if each is read alone: one for each of its tables."""
    class_counts: tuple[int, ...]
    """Number of units by size class (the number of bits of the length), smallest first."""
    class_bytes: tuple[int, ...]
    """Bytes of the units of each class."""
    num_blocks: int = 0
    """Number of blocks, where samples are addressed by block; else 0."""
    between_bytes: int = 0
    """Bytes of units that lie between samples: headers and padding of a tar."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.num_reads < 1:
            raise OptionError(f"a plan needs at least one sample, got {self.num_samples} samples")

    @property
    def size_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self.class_bytes)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return sum(self.class_counts)

    @property
    def read_bytes(self) -> float:
        """Bytes of one read, if each sample is read alone."""
        return max(1.0, (self.size_bytes - self.between_bytes) / self.num_reads)

    @property
    def wanted_share(self) -> float:
        """The share of the units' bytes that belong to samples."""
        return 1 - self.between_bytes / max(1, self.size_bytes)

    @property
    def samples_a_block(self) -> float:
        """Samples that can only be read together; 1 where each is read alone."""
        return self.num_samples / self.num_blocks if self.num_blocks else 1.0

    def units_in(self, placed_bytes: float) -> float:
        """Return how many units lie in the first bytes of the layout."""
        units = 0.0
        for count, size_bytes in zip(self.class_counts, self.class_bytes, strict=True):
            if size_bytes >= placed_bytes:
                return units + (count * placed_bytes / size_bytes if size_bytes else 0.0)
            units += count
            placed_bytes -= size_bytes
        return units


def summary_of(dataset: Dataset | Mixture) -> Summary:
    """Return the summary of a data set, or of a view of one."""
    counts = np.zeros(NUM_CLASSES, np.int64)
    sizes = np.zeros(NUM_CLASSES, np.int64)
    num_reads = num_blocks = between_bytes = 0
    for tables, chosen in chosen_by_part(dataset):
        for table in tables if len(chosen) else ():
            found = _of_table(table, chosen)
            counts += found[0]
            sizes += found[1]
            num_reads += len(chosen)
            between_bytes += int(found[1].sum()) - _wanted_bytes(table, chosen, int(found[1].sum()))
            num_blocks += int(found[0].sum()) if table.addressing == "blocks" else 0
    return Summary(
        num_samples=len(dataset),
        num_reads=num_reads,
        class_counts=tuple(counts.tolist()),
        class_bytes=tuple(sizes.tolist()),
        num_blocks=num_blocks,
        between_bytes=between_bytes,
    )


def _wanted_bytes(table: Table, chosen: Chosen, unit_bytes: int) -> int:
    """Return the bytes of the chosen samples themselves; blocks are wanted whole.

    Windows of a token stream may overlap: they are no more than the units that hold them.
    """
    if table.addressing == "blocks":
        return unit_bytes
    if table.addressing == "even":
        first = table.first_sample
        if not isinstance(chosen, range):
            return min(unit_bytes, int(table.extents(chosen).length.sum()))
        rows = np.clip(first[1:], *_ends(chosen)) - np.clip(first[:-1], *_ends(chosen))
        return min(unit_bytes, int((rows * table.even_layout()[2]).sum()))
    lengths = table.sample_bytes()
    some = lengths[chosen.start : chosen.stop] if isinstance(chosen, range) else lengths[chosen]
    return min(unit_bytes, int(some.sum(dtype=np.int64)))


def _of_table(table: Table, chosen: Chosen) -> tuple[Ints, Ints]:
    """Return the number and the bytes of the units of each size class."""
    if table.addressing == "even" and isinstance(chosen, range):
        return _of_even(table, chosen)
    if table.addressing == "blocks":
        lengths = cut_table(table, chosen).lengths
        return by_class(lengths)
    counts, sizes = np.zeros((2, NUM_CLASSES), np.int64)
    for _, lengths in runs_of(table, chosen):
        more = by_class(lengths)
        counts += more[0]
        sizes += more[1]
    return counts, sizes


def _of_even(table: Table, chosen: range) -> tuple[Ints, Ints]:
    """Return the same for rows at even distances; units of an object are taken as of one size."""
    runs = EvenRuns.of(table, chosen)
    _, stride, width = table.even_layout()
    first = table.first_sample
    rows = np.clip(first[1:], *_ends(chosen)) - np.clip(first[:-1], *_ends(chosen))
    # A run of k rows takes (k - 1)·stride + width; all runs of an object together:
    total = np.where(
        runs.counts == rows, rows * width, rows * stride + runs.counts * (width - stride)
    )
    counts, sizes = np.zeros((2, NUM_CLASSES), np.int64)
    some = runs.counts > 0
    classes = np.frexp((total[some] / runs.counts[some]).astype(np.float64))[1]
    np.add.at(counts, classes, runs.counts[some])
    np.add.at(sizes, classes, total[some])
    return counts, sizes


def _ends(chosen: range) -> tuple[int, int]:
    return chosen.start, chosen.stop


def by_class(lengths: Ints) -> tuple[Ints, Ints]:
    """Return how many of some lengths there are in each size class, and their bytes."""
    classes = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(classes, minlength=NUM_CLASSES).astype(np.int64)
    # In whole numbers: sums of floats would lose bytes of large sets.
    sizes = np.zeros(NUM_CLASSES, np.int64)
    np.add.at(sizes, classes, lengths)
    return counts, sizes
