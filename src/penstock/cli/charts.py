"""Pictures made of characters: bars and histograms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.units import show_bytes

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BINS_MIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Samples whose size lies between two bounds, the lower one included."""

    low_bytes: float
    high_bytes: float
    count: int


def log_bins(sizes: npt.NDArray[np.int64], bins_max: int = 12) -> list[Bin]:
    """Return how sizes are spread, in bins of equal ratio.

    >>> [b.count for b in log_bins(np.array([1, 1, 10, 100, 1000]), 3)]
    [2, 1, 2]
    """
    if not len(sizes):
        return []
    low, high = max(1, int(sizes.min())), max(1, int(sizes.max()))
    if low == high:
        return [Bin(low_bytes=low, high_bytes=high, count=len(sizes))]
    # A narrow range needs few bins: a fifth more than the last one each, at least.
    num_bins = min(bins_max, max(_BINS_MIN, int(np.log(high / low) / np.log(1.2))))
    edges = np.geomspace(low, high, num_bins + 1)
    counts, _ = np.histogram(np.clip(sizes, low, high), bins=edges)
    return [
        Bin(low_bytes=float(edges[i]), high_bytes=float(edges[i + 1]), count=int(c))
        for i, c in enumerate(counts)
    ]


def bar(share: float, width: int) -> str:
    """Return a bar that fills a share of `width` columns, to an eighth of a column.

    >>> bar(0.5, 4), bar(0.3, 4), bar(0.0, 4), bar(0.001, 4)
    ('██', '█▎', '', '▏')
    """
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)  # One sample in a million is still seen.
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def histogram(bins: Sequence[Bin], width: int) -> list[str]:
    """Return a line for each bin: bounds, bar, share."""
    total = sum(b.count for b in bins)
    most = max((b.count for b in bins), default=1)
    room = width - 34
    lines = []
    for b in bins:
        bounds = f"{show_bytes(b.low_bytes):>7} – {show_bytes(b.high_bytes):<7}"
        drawn = bar(b.count / most, room)
        lines.append(f"  {bounds}  {drawn:<{room}} {b.count / total:>6.1%}")
    return lines
