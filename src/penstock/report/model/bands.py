"""Bands: how sure a forecast is.

Two sources of doubt. Constants were measured with an error, which the model turns into an error of
its answer (`spread`). And the model is not the world: how far it was off in other runs, asked
questions of the same kind, is a table that ships with it (`residuals`); its quantile is the band
(split conformal prediction). A run that the model does not reproduce has a wider band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.report.model.residuals import RESIDUALS
from penstock.report.model.what_if import WhatIf

FIT_MAX = 0.03
"""A model whose replay of its own run is off by more does not fit it."""
SHARE = 0.9
RANKS_SEEN = 4
"""The most ranks of the runs behind the table."""
_NUM_LEAST = 19
"""Of fewer residuals the quantile is the largest of all: those of other questions join them."""
_Z90 = 1.645
_Z50 = 0.674

_KINDS = {
    "ranks": ("nodes", "ranks_per_node"),
    "store": ("store_bandwidth", "store_latency_s", "fetch_factor", "link_bandwidth"),
    "cache": ("memory_cache_bytes", "disk_cache_bytes"),
}
"""What a question is about; everything else is `settings`."""


def kind_of(what_if: WhatIf) -> str:
    """Return the kind of a question, by the change that is hardest to foresee.

    >>> kind_of(WhatIf(workers=4, nodes=8)), kind_of(WhatIf(workers=4)), kind_of(WhatIf())
    ('ranks', 'settings', 'settings')
    """
    changes = what_if.changes
    return next((kind for kind, names in _KINDS.items() if set(names) & set(changes)), "settings")


def quantile(residuals: Sequence[float], share: float = SHARE) -> float:
    """Return the size that a share of all residuals to come stay below (split conformal).

    >>> quantile([0.01 * n for n in range(1, 20)])
    0.18
    """
    sizes = sorted(abs(residual) for residual in residuals)
    place = math.ceil((len(sizes) + 1) * share)
    return sizes[min(place, len(sizes)) - 1]


def half_band(loader: str, what_if: WhatIf, *, spread: float, misfit: float, ranks: int) -> float:
    """Return half a 90 % band, as a logarithm; the forecast lies in its middle."""
    half = quantile(_residuals(loader, kind_of(what_if)))
    if ranks > RANKS_SEEN:
        # Nobody measured runs of this size: each doubling adds an independent doubt of that size.
        half *= math.sqrt(1 + math.log2(ranks / RANKS_SEEN))
    return max(half, _Z90 * spread) + max(0.0, abs(misfit) - FIT_MAX)


def _residuals(loader: str, kind: str) -> tuple[float, ...]:
    """Return residuals of the same loader and kind; where these are few, of wider circles."""
    tables = RESIDUALS["penstock" if loader == "penstock" else "torch"]
    own = tables.get(kind, ())
    of_loader = tuple(r for table in tables.values() for r in table)
    of_all = tuple(r for t in RESIDUALS.values() for table in t.values() for r in table)
    return next((r for r in (own, of_loader) if len(r) >= _NUM_LEAST), of_all)


def half_of_fifty(half: float) -> float:
    """Return half a 50 % band from half a 90 % band."""
    return half * _Z50 / _Z90
