"""Bands: how sure a forecast is.

A forecast has a doubt, in the terms of a standard deviation: what chance makes of one run, what the
measuring errors of constants make of the answer, how badly the model fits the runs that it was
calibrated with, and a floor for what nobody thought of. How many doubts forecasts were off in other
runs is a table that ships with the model (`residuals`); its quantile times the doubt is the band
(split conformal prediction, normalised).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from penstock.report.model.residuals import RESIDUALS

Quantity = Literal["step_s", "first_epoch_s", "stall_share", "store_bytes", "peer_bytes"]
"""What a forecast has a band for. Residuals of times and bytes are logarithms, those of the stall
share are differences. Epochs after the first have the band of their steps."""
FIT_MAX = 0.03
"""A model whose replay of its own run is off by more does not fit it."""
SHARE = 0.9
RANKS_SEEN = 6
"""The most ranks of the runs behind the table."""
_NUM_LEAST = 19
"""Of fewer residuals the quantile is the largest of all: those of other loaders join them."""
_FLOORS: dict[Quantity, float] = {
    "step_s": 0.03,
    "first_epoch_s": 0.03,
    "stall_share": 0.03,
    "store_bytes": 0.002,
    "peer_bytes": 0.02,
}
"""The doubt of a forecast whose constants are known and whose runs are all alike. Of bytes it is
all there is: how many are read does not hang on times."""
_BYTES: tuple[Quantity, ...] = ("store_bytes", "peer_bytes")
_HALF_MAX = math.log(1000)
"""A band that is wider says no more than this: the model knows nothing. Of a run that was disturbed
badly the doubt has no bound, and its exponential would overflow."""


def quantile(residuals: Sequence[float], share: float = SHARE) -> float:
    """Return the size that a share of all residuals to come stay below (split conformal).

    >>> quantile([0.01 * n for n in range(1, 20)])
    0.18
    """
    sizes = sorted(abs(residual) for residual in residuals)
    place = math.ceil((len(sizes) + 1) * share)
    return sizes[min(place, len(sizes)) - 1]


def doubt(quantity: Quantity, *, spread: float, misfit: float, ranks: int) -> float:
    """Return the doubt of a forecast.

    `spread` is what chance and errors of constants make of the answer, `misfit` how far the model
    is off on its own runs beyond chance.

    >>> doubt("step_s", spread=0.04, misfit=0.0, ranks=1)
    0.05
    """
    floor = _FLOORS[quantity]
    if quantity in _BYTES:
        return floor
    # Nobody measured runs of this size: each doubling adds an independent doubt of that size.
    doublings = max(0.0, math.log2(ranks / RANKS_SEEN))
    return math.hypot(floor, spread, misfit) * math.sqrt(1 + doublings)


def half_band(quantity: Quantity, loader: str, doubt: float) -> float:
    """Return half a 90 % band, in the terms of a residual; the forecast lies in its middle."""
    return min(_HALF_MAX, quantile(_residuals(quantity, loader)) * doubt)


def _residuals(quantity: Quantity, loader: str) -> tuple[float, ...]:
    """Return residuals of the same loader; where these are few, of all."""
    tables = RESIDUALS[quantity]
    own = tables.get("penstock" if loader == "penstock" else "torch", ())
    of_all = tuple(residual for table in tables.values() for residual in table)
    return own if len(own) >= _NUM_LEAST else of_all
