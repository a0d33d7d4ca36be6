"""The cache against its bound: hits of this run, and what other sizes would bring."""

from __future__ import annotations

import numpy as np

from penstock.report.analysis.values import Analysis
from penstock.report.charts import Axis, Line, LineChart, Mark, PageSection, Part, Tiles
from penstock.report.model.lru import lru_hits
from penstock.report.pages.words import percent
from penstock.units import show_bytes

_PLACES = 101


def cache_section(analysis: Analysis) -> PageSection | None:
    """Return hits against what was possible; None where nothing is known of a cache."""
    bound = analysis.bound
    if bound is None:
        return None
    share = min(1.0, bound.cache_bytes / bound.dataset_bytes) if bound.dataset_bytes else 0.0
    parts: list[Part] = [
        Tiles(
            tiles=[
                (show_bytes(bound.store_bytes), "read from the store"),
                (show_bytes(bound.bound_bytes), "the least possible with this cache"),
                (f"{bound.ratio:.3f}", "times the least possible"),
                (percent(bound.hits), "hits after the first epoch"),
            ]
        )
    ]
    if bound.num_epochs > 1:
        sizes = np.linspace(0.0, 1.0, _PLACES)
        parts.append(
            LineChart(
                title="Hits against the size of the cache",
                reading=(
                    "In plain epochs a cache that never evicts hits its own share of the data set, "
                    "and nothing can do better. LRU, as the page cache has it, needs nearly all of "
                    "the data set before it helps."
                ),
                x=Axis(name="cache as a share of the data set", unit="share"),
                y=Axis(name="hits after the first epoch", unit="share", low=0.0, high=1.0),
                lines=[
                    Line(name="never evicts: the bound", x=sizes, y=sizes, is_dashed=True),
                    Line(name="LRU", x=sizes, y=lru_hits(sizes)),
                    Line(name="this run", x=[share], y=[bound.hits], style="points"),
                ],
                marks=[Mark(label="this run's cache", x=share)],
            )
        )
    return PageSection(title="Cache", parts=parts)
