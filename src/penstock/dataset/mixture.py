"""Several data sets as one, drawn by weight."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.arguments import number_of, optional_count
from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.fields import Field
from penstock.dataset.part import Ints, merge_fields
from penstock.errors import OptionError


def datasets_of(dataset: Dataset | Mixture) -> list[Dataset]:
    """Return the data sets of a mixture, or the one that it is."""
    return list(dataset.datasets) if isinstance(dataset, Mixture) else [dataset]


class Mixture(Sequence[dict[str, Any]]):
    """Data sets and the share of the stream that each of them gets.

    Sample ids count through the data sets one after the other. A small set with a large weight is
    gone through several times in an epoch, each time in a fresh order; no sample of it returns
    before all others of it were used.

    Args:
        datasets: a list of data sets, or a dictionary: of data sets by name, or from data set to
            weight.
        weights: a number for each data set, up to a common factor, in the order of `datasets` or by
            the same names; by default their sizes. A data set of weight 0 is never drawn.
        samples_per_epoch: how many samples an epoch has; by default as many as all data sets.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset] | Mapping[str, Dataset] | Mapping[Dataset, float],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        *,
        samples_per_epoch: int | None = None,
    ) -> None:
        several, given = _in_order(datasets, weights)
        self.datasets = tuple(map(_dataset_of, several))
        sizes = [len(d) for d in self.datasets]
        if not sizes or 0 in sizes:
            empty = f"; number {sizes.index(0)} is" if sizes else ", got none"
            raise OptionError(f"a mixture needs data sets that are not empty{empty}")
        self.weights = tuple(number_of("a weight", w) for w in (sizes if given is None else given))
        if len(self.weights) != len(self.datasets):
            raise OptionError(f"{len(self.weights)} weights for {len(self.datasets)} data sets")
        if not any(self.weights):
            raise OptionError(f"no data set would be drawn: all weights are 0 ({self.weights})")
        chosen = optional_count("samples_per_epoch", samples_per_epoch)
        self.samples_per_epoch = sum(sizes) if chosen is None else chosen
        self.starts = np.cumsum([0, *sizes]).astype(np.int64)

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
            f"{float(w):g} × {d!r}" for w, d in zip(self.weights, self.datasets, strict=True)
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


def _in_order(datasets: Any, weights: Any) -> tuple[list[Any], list[Any] | None]:
    """Return data sets and weights side by side, however they were given."""
    if isinstance(datasets, Mapping):
        names = list(datasets)
        if names and all(isinstance(name, Dataset) for name in names):
            if weights is not None:
                raise OptionError("weights are given twice: in the dictionary and as weights=")
            return names, list(datasets.values())
        if isinstance(weights, Mapping):
            if weights.keys() != datasets.keys():
                raise OptionError(
                    f"weights are for {sorted(weights)}, data sets are {sorted(datasets)}; give "
                    "each data set a weight under the same name"
                )
            return list(datasets.values()), [weights[name] for name in names]
        datasets = list(datasets.values())
    if isinstance(datasets, str | Dataset) or not isinstance(datasets, Sequence):
        raise OptionError(
            f"a mixture takes several data sets, [first, second] or {{first: weight}}, got "
            f"{datasets!r}"
        )
    if isinstance(weights, str | Mapping) or not isinstance(weights, Sequence | np.ndarray | None):
        raise OptionError(f"weights must be one number for each data set, got {weights!r}")
    return list(datasets), None if weights is None else list(weights)


def _dataset_of(dataset: Any) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset
    if isinstance(dataset, str | os.PathLike):
        raise OptionError(
            f"{dataset!r} is a name and not yet a data set; give "
            f"penstock.open({os.fspath(dataset)!r})"
        )
    hint = "; mix all data sets in one, with weights of their own" * isinstance(dataset, Mixture)
    raise OptionError(
        f"a mixture is made of data sets, which penstock.open returns; got "
        f"{type(dataset).__name__}{hint}"
    )
