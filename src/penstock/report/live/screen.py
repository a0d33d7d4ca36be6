"""The page of `penstock top`: from ranks to lines. Pure.

Totals, then a line a rank. Where there are more ranks than lines, those that differ are shown: the
slowest and the fastest, and all that do not run; histograms stand for the rest.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.snapshot import LiveCounts, LiveRank
from penstock.units import show_bytes, show_count, show_seconds

Piece = str | tuple[str, str]
"""A text, or a text and a style."""
PageLine = list[Piece]

_WIDE = 110
_HEAD_LINES = 6
"""Lines of the page that are neither ranks nor the hint."""
_STALL_HIGH = 0.1
"""A share of waiting that deserves a hint."""
_APART = 0.05
"""Ranks that differ by less are alike."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"killed": "red", "silent": "red", "ended": "dim", "starting": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One figure of a rank."""

    title: str
    width: int
    text: Callable[[LiveRank], str]
    is_wide: bool = False
    """Shown only where there is room."""


def _rate(rank: LiveRank, count: float) -> float:
    return count / rank.recent.elapsed_s if rank.recent.elapsed_s > 0 else 0.0


def _source_rate(rank: LiveRank, wanted: Callable[[str], bool]) -> str:
    found = [s.size_bytes for name, s in rank.recent.sources.items() if wanted(name)]
    return show_bytes(_rate(rank, sum(found))) + "/s" if found else "–"


def _is_tier(name: str) -> bool:
    return name.startswith("tier:")


def _is_store(name: str) -> bool:
    return not _is_tier(name) and name != "peers"


def _run_rate(rank: LiveRank) -> float:
    counts = rank.now.counts
    return counts.samples / counts.elapsed_s if counts.elapsed_s > 0 else 0.0


_COLUMNS = (
    _Figure(title="rank", width=5, text=lambda r: str(r.now.rank)),
    _Figure(title="state", width=9, text=lambda r: r.now.state),
    _Figure(title="epoch", width=6, text=lambda r: str(r.now.epoch) if r.now.epoch >= 0 else "–"),
    _Figure(title="steps", width=8, text=lambda r: show_count(r.now.counts.batches)),
    _Figure(title="smp/s", width=8, text=lambda r: short(r.samples_per_s)),
    _Figure(title="in all", width=8, text=lambda r: short(_run_rate(r))),
    _Figure(title="stall", width=7, text=lambda r: f"{r.recent.stall_share:.1%}"),
    _Figure(title="in all", width=7, text=lambda r: f"{r.now.counts.stall_share:.1%}"),
    _Figure(title="ready", width=6,
            text=lambda r: "–" if r.now.ready_batches is None else f"{r.now.ready_batches:.3g}"),
    _Figure(title="reads", width=6, text=lambda r: f"{r.recent.reads_in_flight:.1f}"),
    _Figure(title="decode", width=7, is_wide=True,
            text=lambda r: f"{r.recent.decodes_at_a_time:.1f}"),
    _Figure(title="cpu", width=5, is_wide=True,
            text=lambda r: f"{r.recent.loader_cores:.1f}" if r.recent.cpu_s else "–"),
    _Figure(title="memory", width=9, is_wide=True,
            text=lambda r: show_bytes(r.now.memory_bytes) if r.now.memory_bytes else "–"),
    _Figure(title="store", width=11, is_wide=True, text=lambda r: _source_rate(r, _is_store)),
    _Figure(title="tiers", width=11, is_wide=True, text=lambda r: _source_rate(r, _is_tier)),
    _Figure(title="peers", width=11, is_wide=True,
            text=lambda r: _source_rate(r, lambda name: name == "peers")),
)  # fmt: skip


def page_of_ranks(
    title: str, ranks: Sequence[LiveRank], *, width: int = 80, height: int = 1000
) -> list[PageLine]:
    """Return the page of a run, at most as wide and as a rule at most as high as asked for."""
    slowest = slowest_of(ranks)
    columns = [c for c in _COLUMNS if width >= _WIDE or not c.is_wide]
    header = "".join(f"{column.title:>{column.width}}" for column in columns)
    hint = textwrap.wrap(hint_of(ranks, slowest), width)
    shown = _shown(ranks, max(4, height - _HEAD_LINES - len(hint)), slowest)
    lines: list[PageLine] = [*_totals(title, ranks), [], [(header, "dim")]]
    for rank in shown:
        text = "".join(f"{column.text(rank):>{column.width}}" for column in columns)
        style = _STYLES.get(rank.now.state, "yellow" if rank is slowest else "")
        mark = "  ◂" if rank is slowest else ""
        lines.append([(text + mark, style) if style else text])
    if len(shown) < len(ranks):
        lines += _histograms(ranks, len(ranks) - len(shown))
    if hint:
        lines.append([])
        lines += [[(text, "bold")] for text in hint]
    return [_fitted(line, width) for line in lines]


def slowest_of(ranks: Sequence[LiveRank]) -> LiveRank | None:
    """Return the rank that holds the others up, if one does.

    Ranks that exchange gradients go at one pace, and only the slowest waits for its data: then it
    is the one with the most stall. Otherwise it is the one with the fewest samples a second.
    """
    going = [rank for rank in ranks if rank.now.state == "running"]
    if len(going) < 2:
        return None
    pace = min(going, key=lambda rank: rank.samples_per_s)
    if pace.samples_per_s < (1 - _APART) * statistics.median(r.samples_per_s for r in going):
        return pace
    waits = max(going, key=lambda rank: rank.recent.stall_share)
    usual = statistics.median(r.recent.stall_share for r in going)
    return waits if waits.recent.stall_share > usual + _APART else None


def hint_of(ranks: Sequence[LiveRank], slowest: LiveRank | None = None) -> str:
    """Return what the ranks seem to wait for, in a sentence; nothing where they hardly wait."""
    going = [rank for rank in ranks if rank.now.state == "running"]
    if slowest is not None and slowest.recent.stall_share > _STALL_HIGH and len(going) > 1:
        others = [rank for rank in going if rank is not slowest]
        if max(rank.recent.stall_share for rank in others) < _STALL_HIGH:
            return f"only rank {slowest.now.rank} waits for data: {_busy(slowest.recent)}"
    total = sum((rank.recent for rank in going), LiveCounts())
    if not going or total.stall_share < _STALL_HIGH:
        return ""
    return f"ranks wait {total.stall_share:.0%} of the time: {_busy(total)}"


def _busy(counts: LiveCounts) -> str:
    """Return what goes on while a rank waits."""
    reads, decodes = counts.reads_in_flight, counts.decodes_at_a_time
    figures = f"{reads:.1f} reads and {decodes:.1f} decodes at a time on a rank"
    if counts.cpu_s:
        # Far fewer cores than decodes: workers wait for a core, or for something of their own.
        figures += f", {counts.loader_cores:.1f} cores in use"
    if max(reads, decodes) < 0.5:
        return f"hardly anything is read or decoded ({figures})"
    if decodes > reads:
        return f"decoding keeps workers busy ({figures})"
    most = max(counts.sources, key=lambda name: counts.sources[name].seconds)
    return f"reads from {most} take the time ({figures})"


def short(value: float) -> str:
    """Return a rate in at most six characters.

    >>> short(0), short(3.14159), short(999.6), short(12_345), short(2_345_678)
    ('0', '3.14', '1k', '12.3k', '2.35M')
    """
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def _totals(title: str, ranks: Sequence[LiveRank]) -> list[PageLine]:
    going = [rank for rank in ranks if rank.now.state == "running"]
    shown = going or list(ranks)
    recent = sum((rank.recent for rank in shown), LiveCounts())
    total = sum((rank.now.counts for rank in shown), LiveCounts())
    hosts = len({rank.now.host for rank in ranks})
    state = f"{len(going)} of {len(ranks)} ranks running, {hosts} host{'s' * (hosts != 1)}"
    seconds = max((rank.now.counts.elapsed_s for rank in ranks), default=0.0)
    rates: dict[str, float] = {}
    for rank in shown:
        for name, source in rank.recent.sources.items():
            rates[name] = rates.get(name, 0.0) + _rate(rank, source.size_bytes)
    sources = "   ".join(f"{name} {show_bytes(rate)}/s" for name, rate in rates.items())
    cores = sum(rank.recent.loader_cores for rank in shown)
    memory = sum(rank.now.memory_bytes for rank in shown)
    used = f"   cpu {cores:.1f} cores, {show_bytes(memory)}" if recent.cpu_s else ""
    return [
        [("penstock top", "bold"), f"  {state}, {show_seconds(seconds)}   {title}"],
        [
            f"  {short(sum(r.samples_per_s for r in shown))} samples/s "
            f"({short(sum(map(_run_rate, shown)))} over the run)   "
            f"stall {recent.stall_share:.1%} ({total.stall_share:.1%} over the run)"
        ],
        [f"  {sources or 'no reads of late'}{used}"],
    ]


def _shown(ranks: Sequence[LiveRank], most: int, slowest: LiveRank | None) -> list[LiveRank]:
    """Return the ranks that get a line, in order."""
    if len(ranks) <= most:
        return list(ranks)
    room = most - 3  # The histograms take the rest.
    odd = [rank for rank in ranks if rank is slowest or rank.now.state != "running"]
    by_pace = sorted(ranks, key=lambda rank: (rank.samples_per_s, -rank.recent.stall_share))
    fastest = by_pace[-max(1, room // 4) :]
    chosen: dict[int, LiveRank] = {}
    for rank in (*odd[: room - 2], *fastest, *by_pace):
        if len(chosen) < room:
            chosen[id(rank)] = rank
    return sorted(chosen.values(), key=lambda rank: rank.now.rank)


def _histograms(ranks: Sequence[LiveRank], num_hidden: int) -> list[PageLine]:
    paces = [rank.samples_per_s for rank in ranks]
    stalls = [rank.recent.stall_share for rank in ranks]
    return [
        [(f"  and {num_hidden} ranks more; how all {len(ranks)} are spread:", "dim")],
        [f"  samples/s {short(min(paces)):>6} {_bars(paces)} {short(max(paces))}"],
        [f"  stall     {min(stalls):>6.1%} {_bars(stalls)} {max(stalls):.1%}"],
    ]


def _bars(values: Sequence[float], num_bins: int = 24) -> str:
    counts, _ = np.histogram(values, bins=num_bins)
    most = counts.max()
    return "".join(
        " " if not count else _BLOCKS[int((len(_BLOCKS) - 1) * count / most)]
        for count in counts.tolist()
    )


def _fitted(line: PageLine, width: int) -> PageLine:
    """Return a line that is not wider."""
    out: PageLine = []
    for piece in line:
        text, style = (piece, "") if isinstance(piece, str) else piece
        if len(text) > width:
            text = text[: max(0, width - 1)] + "…"
        width -= len(text)
        if text:
            out.append((text, style) if style else text)
    return out
