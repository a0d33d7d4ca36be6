"""The steps that the shares of causes are taken of.

Checkpoints and a late rank take their own shares first; the causes of what is left are found among
the steps of the other ranks that no checkpoint disturbs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.bound import store_bytes
from penstock.report.analysis.interference import settled_real, share_band
from penstock.report.analysis.values import WAITS, Analysis, Evidence, Finding, Floats, StepTable

SKEW_MIN = 0.5
"""Share of the time of requests that slow objects must explain to be the cause of it."""
RANK_BYTES_SKEW = 1.3
"""A rank that reads this many times the bytes of the others has the larger shard."""
LATE_RANK = 0.6
"""Share of the waiting for other ranks that has to be for the same one."""


def make_finding(
    cause: str, band: tuple[float, float, float], sentence: str, *evidence: tuple[str, float | None]
) -> Finding:
    """Return a finding with those figures of its evidence that are known."""
    share, low, high = band
    known = tuple(Evidence(sentence=s, value=float(v)) for s, v in evidence if v is not None)
    return Finding(cause=cause, share=share, low=low, high=high, sentence=sentence, evidence=known)


@dataclass(frozen=True, kw_only=True)
class StepBasis:
    """The steps that the shares are taken of, and the shares."""

    analysis: Analysis
    rows: npt.NDArray[np.int64]
    """Rows of the step table: of the rank that the others waited for, or of typical ranks."""
    checkpoint: Finding | None
    straggler: Finding | None
    scale: float
    """What the steps in `rows` are of the whole: 1 minus what checkpoints and a straggler take."""

    def later(self) -> StepBasis:
        """Return the same of the epochs after a cold first one; the same where there are none."""
        table, bound = self.analysis.steps, self.analysis.bound
        first = self.analysis.epochs[0]
        is_cold = (
            bound is not None and store_bytes(first.bytes_by_source) > 0.9 * bound.dataset_bytes
        )
        rows = self.rows[table.epoch[self.rows] > first.epoch]
        return replace(self, rows=rows) if is_cold and len(rows) else self

    def band(self, *names: str, sources: Iterable[str] | None = None) -> tuple[float, float, float]:
        """Return the share of some categories with its band; `sources`: of fetch, only those."""
        table = self.analysis.steps
        part: Floats = np.zeros(len(self.rows))
        for name in names:
            part = part + table.parts[name][self.rows]
        for source in sources or ():
            part = part + table.fetch_by_source[source][self.rows]
        share, low, high = share_band(part, table.wall_s[self.rows])
        return share * self.scale, low * self.scale, high * self.scale


def ground_of(analysis: Analysis) -> StepBasis:
    """Return the steps that speak for the run, with what one rank or checkpoints take apart."""
    table = analysis.steps
    kept = settled_real(table)
    checkpoint, near = _checkpoint(analysis, kept)
    if checkpoint is not None:
        kept &= ~near
    straggler, ranks = _straggler(analysis, kept)
    rows = np.flatnonzero(kept & np.isin(table.rank, ranks)) if ranks else _critical(table, kept)
    taken = sum(f.share for f in (checkpoint, straggler) if f is not None)
    return StepBasis(
        analysis=analysis,
        rows=rows,
        checkpoint=checkpoint,
        straggler=straggler,
        scale=max(0.0, 1 - taken),
    )


def _critical(table: StepTable, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return, of each step, the row of the rank that the others waited for."""
    if not (table.waited_for >= 0).any():
        return np.flatnonzero(kept)
    order = np.lexsort((table.parts["barrier"], table.step))
    order = order[kept[order]]
    first = np.flatnonzero(np.diff(table.step[order], prepend=-1))
    return order[first]


def _checkpoint(
    analysis: Analysis, kept: npt.NDArray[np.bool_]
) -> tuple[Finding | None, npt.NDArray[np.bool_]]:
    """Return what checkpoints cost: steps that overlap one, or follow one, against the others."""
    table = analysis.steps
    near = np.zeros(len(table), bool)
    for start_s, end_s in analysis.checkpoints:
        near |= (table.start_s < end_s) & (table.start_s + table.wall_s > start_s)
    # A checkpoint evicts and competes: the step after it is its victim, too.
    near |= np.roll(near, 1) & (table.rank == np.roll(table.rank, 1))
    if not near.any() or not kept.any():
        return None, near
    if not (kept & ~near).any():
        # Every step is beside a checkpoint, so there is no other step to compare with.
        return _all_checkpoint(analysis, kept), np.zeros(len(table), bool)
    usual = float(np.median(table.wall_s[kept & ~near]))
    excess = np.where(near, np.maximum(0.0, table.wall_s - usual), 0.0)[kept]
    share, low, high = share_band(excess, table.wall_s[kept])
    count = len(analysis.checkpoints)
    longer = float(np.median(table.wall_s[kept & near])) / max(1e-9, usual)
    sentence = (
        f"{count} checkpoints take {share:.0%} of the time: steps beside them last {longer:.1f} "
        "times as long as others"
    )
    return (
        Finding(
            cause="checkpoint-interference",
            share=share,
            low=low,
            high=high,
            sentence=sentence,
            evidence=(Evidence(sentence="steps beside checkpoints, by others", value=longer),),
        ),
        near,
    )


def _all_checkpoint(analysis: Analysis, kept: npt.NDArray[np.bool_]) -> Finding:
    """Return what checkpoints take where every step is beside one."""
    table = analysis.steps
    band = share_band(table.parts["checkpoint"][kept], table.wall_s[kept])
    count = len(analysis.checkpoints)
    return make_finding(
        "checkpoint-interference",
        band,
        f"{count} checkpoints take {band[0]:.0%} of the time: every step is beside one",
    )


def _straggler(analysis: Analysis, kept: npt.NDArray[np.bool_]) -> tuple[Finding | None, list[int]]:
    """Return the rank that the others wait for, and the other ranks."""
    table = analysis.steps
    waited = table.waited_for[kept]
    ranks = sorted(np.unique(table.rank).tolist())
    if len(ranks) < 2 or not (waited >= 0).any():
        return None, []
    barrier = table.parts["barrier"]
    weight = np.bincount(waited[waited >= 0], barrier[kept][waited >= 0], max(ranks) + 1)
    rank = int(weight.argmax())
    others = [r for r in ranks if r != rank]
    if weight[rank] < LATE_RANK * max(1e-12, weight.sum()):
        return None, []
    of = kept & np.isin(table.rank, others)
    share, low, high = share_band(
        np.where(table.waited_for == rank, barrier, 0)[of], table.wall_s[of]
    )
    mine = kept & (table.rank == rank)
    excess = {
        name: float(v[mine].mean() - v[of].mean())
        for name, v in table.parts.items()
        if name != "barrier"
    }
    worst = max(excess, key=lambda name: excess[name])
    longer_s = sum(excess.values())
    cause, reason = _straggler_cause(analysis, rank, others, worst)
    sentence = (
        f"rank {rank} is the last one in most steps: the others wait for it {share:.0%} of the "
        f"time; it takes {longer_s * 1e3:.3g} ms longer a step, the largest part of it in {worst}"
        f"{reason}"
    )
    evidence = (
        Evidence(
            sentence=f"share of barrier time due to rank {rank}", value=weight[rank] / weight.sum()
        ),
        Evidence(sentence=f"seconds more a step in {worst}", value=excess[worst]),
    )
    found = Finding(
        cause=cause, share=share, low=low, high=high, sentence=sentence, evidence=evidence
    )
    return found, others


def _straggler_cause(
    analysis: Analysis, rank: int, others: list[int], worst: str
) -> tuple[str, str]:
    """Return why a rank is late: its data, or the rank itself."""
    sharing = analysis.sharing
    usual = float(np.median([sharing.rank_bytes.get(r, 0) for r in others]))
    mine = sharing.rank_bytes.get(rank, 0)
    if usual and mine >= RANK_BYTES_SKEW * usual:
        return "skewed-shards", f"; it reads {mine / usual:.1f} times the bytes of the others"
    if worst in WAITS:
        slow = sharing.slow_share_by_rank.get(rank, 0.0)
        if slow >= SKEW_MIN:
            return "skewed-shards", f"; a few slow objects take {slow:.0%} of its reading time"
    return "straggler-rank", ""
