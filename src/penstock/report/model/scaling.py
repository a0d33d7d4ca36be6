"""How a run grows: a forecast for each number of nodes, and where the next limit takes over."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.report.model.run_model import RunModel
from penstock.report.model.what_if import Forecast, WhatIf


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """From how many nodes on something else limits the run."""

    nodes: int
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """How forecasts change with the number of nodes."""

    forecasts: Mapping[int, Forecast]
    """By nodes, in rising order."""
    takeovers: tuple[Takeover, ...]


def scaling_curve(
    model: RunModel, nodes: Sequence[int], what_if: WhatIf | None = None
) -> ScalingCurve:
    """Return forecasts for numbers of nodes; batches of a rank stay as they are."""
    base = what_if or WhatIf()
    asked = {count: model.predict(replace(base, nodes=count)) for count in sorted(set(nodes))}
    return ScalingCurve(forecasts=asked, takeovers=takeovers(model, asked, base))


def takeovers(
    model: RunModel, asked: Mapping[int, Forecast], what_if: WhatIf
) -> tuple[Takeover, ...]:
    """Return where the limit changes between forecasts by nodes."""
    return tuple(
        _takeover(model, what_if, (low, asked[low].limit), (high, asked[high].limit))
        for low, high in itertools.pairwise(sorted(asked))
        if asked[low].limit != asked[high].limit
    )


def _takeover(
    model: RunModel, what_if: WhatIf, low: tuple[int, str], high: tuple[int, str]
) -> Takeover:
    """Return the first number of nodes between two with the limit of the larger one."""
    below, above = low[0], high[0]
    while above - below > max(1, below // 4):
        middle = (below + above) // 2
        if model.outline(replace(what_if, nodes=middle)).limit == high[1]:
            above = middle
        else:
            below = middle
    return Takeover(nodes=above, before=low[1], after=high[1])
