"""Several data sets as one, drawn by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.fields import Field
from penstock.dataset.part import Ints, merge_fields
from penstock.errors import OptionError


class Mixture(Sequence[dict[str, Any]]):
    """Data sets and the share of the stream that each of them gets.

    Sample ids count through the data sets one after the other. A small set with a large weight is
    gone through several times in an epoch, each time in a fresh order; no sample of it returns
    before all others of it were used.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        *,
        samples_per_epoch: int | None = None,
    ) -> None:
        if not datasets or any(len(d) == 0 for d in datasets):
            raise OptionError("a mixture needs at least one data set, and none may be empty")
        self.datasets = tuple(datasets)
        self.weights = tuple(weights) if weights is not None else tuple(map(len, datasets))
        if len(self.weights) != len(self.datasets):
            raise OptionError(f"{len(self.weights)} weights for {len(self.datasets)} data sets")
        self.samples_per_epoch = samples_per_epoch or sum(map(len, datasets))
        self.starts = np.cumsum([0] + [len(d) for d in datasets]).astype(np.int64)

    @property
    def bound(self) -> tuple[BoundPart, ...]:
        """All parts of all data sets."""
        return tuple(b for d in self.datasets for b in d.bound)

    @property
    def fields(self) -> dict[str, Field]:
        """All fields of all data sets; those that one of them lacks are optional."""
        fields = merge_fields([tuple(d.fields.values()) for d in self.datasets])
        return {f.name: f for f in fields}

    @property
    def fingerprint(self) -> str:
        """A hash of what is mixed; weights belong to the order."""
        names = "".join(d.fingerprint for d in self.datasets)
        return xxhash.xxh3_128_hexdigest(names.encode())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: Any) -> Any:
        chosen = range(len(self))[i]
        if isinstance(chosen, range):
            return self.__getitems__(chosen)
        return self.__getitems__([chosen])[0]

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{w:g} × {d!r}" for w, d in zip(self.weights, self.datasets, strict=True)
        )
        return f"Mixture({parts})"

    def __getitems__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples."""
        out = []
        for i in ids:
            number = int(np.searchsorted(self.starts, i, side="right")) - 1
            out.append(self.datasets[number][int(i - self.starts[number])])
        return out

    def groups(self, ids: Ints) -> list[tuple[BoundPart, Ints, Ints]]:
        """Return some samples by the part they lie in."""
        numbers = np.searchsorted(self.starts, ids, side="right") - 1
        out = []
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            for bound, inside, local in self.datasets[number].groups(
                ids[where] - self.starts[number]
            ):
                out.append((bound, where[inside], local))
        return out
