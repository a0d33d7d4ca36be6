"""Scores: what is known about each sample, as whole numbers.

All ranks hold the same table, and draw the same samples from it. So everything in it is an integer:
sums of floats depend on the order of their terms and on the processor. A table is changed one
window at a time, by the losses of that window in the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import OptionError
from penstock.order.importance.options import Floats, Importance
from penstock.order.keys import Ids

Points: TypeAlias = npt.NDArray[np.uint32]

LOG_RANK_POINTS = 2048
"""Points of one unit of the logarithm."""
LOSS_POINTS = 4096
"""Points of a loss of 1."""
BY_LOSS = ("loss", "cost-aware")
"""Scores that are a moving average of the loss."""
_POINTS_MAX = 2**31 - 1
_PLACE_MAX = 2**16 - 1
_RANKS_MIN = 64
_RANK_OFFSET = 10
"""SHADE's: the hardest of 64 samples is drawn 1.86 times as often as the easiest."""


class StepLosses(NamedTuple):
    """The losses of one global batch."""

    ids: Ids
    losses: Floats


class ScoreTable:
    """What is known about each sample: three numbers."""

    def __init__(self, num_samples: int) -> None:
        self.score: Points = np.zeros(num_samples, np.uint32)
        """What draws go by; 0 where a sample was not seen yet, or never had a finite loss."""
        self.hardness: npt.NDArray[np.uint16] = np.zeros(num_samples, np.uint16)
        """Moving average of a sample's place in its batch by loss: 0 easiest, 65,535 hardest."""
        self.num_seen: npt.NDArray[np.uint8] = np.zeros(num_samples, np.uint8)
        """How often it was scored, up to 255."""

    def copy(self) -> ScoreTable:
        """Return a table that changes by itself."""
        other = ScoreTable(0)
        other.score, other.hardness = self.score.copy(), self.hardness.copy()
        other.num_seen = self.num_seen.copy()
        return other

    def learn(self, steps: Iterable[StepLosses], options: Importance) -> float | None:
        """Take over the losses of some steps, in their order, and return the drift.

        That is the mean distance between a sample's place in its batch and its hardness before, as
        a share of the whole range; None where no sample was scored before.
        """
        distance = num_known = 0
        for step in steps:
            more = self._learn(step, options)
            distance, num_known = distance + more[0], num_known + more[1]
        return distance / num_known / _PLACE_MAX if num_known else None

    def _learn(self, step: StepLosses, options: Importance) -> tuple[int, int]:
        """Return the sum of distances, and of how many samples, for the drift."""
        is_number = np.isfinite(step.losses)
        if not is_number.any():
            return 0, 0  # After an overflow all losses are broken, whatever the samples are.
        self._learn_broken(np.setdiff1d(step.ids[~is_number], step.ids[is_number]))
        ids, losses = step.ids[is_number], step.losses[is_number]
        # By id, so that equal losses have the same places whoever computed them. Of a sample that
        # occurs several times, its largest loss comes last and counts.
        order = np.lexsort((losses, ids))
        ids, losses = ids[order], losses[order]
        ranks = np.empty(len(ids), np.int64)
        ranks[np.argsort(losses, kind="stable")] = np.arange(len(ids))
        is_new = self.num_seen[ids] == 0
        places = ranks * _PLACE_MAX // max(1, len(ids) - 1)
        before = self.hardness[ids].astype(np.int64)
        distance = int(np.abs(places - before)[~is_new].sum())
        self.hardness[ids] = np.where(is_new, places, (3 * before + places) // 4)
        points = _points(losses, ranks, options)
        if options.score in BY_LOSS:
            before = self.score[ids].astype(np.int64)
            points = np.where(is_new, points, (before + points + 1) // 2)
        self.score[ids] = np.maximum(1, points)
        self.num_seen[ids] = np.minimum(254, self.num_seen[ids]) + 1
        return distance, len(ids) - int(is_new.sum())

    def _learn_broken(self, ids: Ids) -> None:
        """Take note of samples without a finite loss: hard for people, and no harder to draw."""
        before = self.hardness[ids].astype(np.int64)
        is_new = self.num_seen[ids] == 0
        self.hardness[ids] = np.where(is_new, _PLACE_MAX, (3 * before + _PLACE_MAX) // 4)
        self.num_seen[ids] = np.minimum(254, self.num_seen[ids]) + 1

    def difficulty(self, options: Importance) -> npt.NDArray[np.float64]:
        """Return how hard each sample is, for people; only for samples that were scored.

        The average loss where draws go by it: then batches are full of hard samples, and a place in
        a batch says little. Else the hardness, from 0 to 1.
        """
        if options.score in BY_LOSS:
            # Without a finite loss, as hard as the hardest.
            return np.where(self.score > 0, self.score, self.score.max()) / LOSS_POINTS
        return self.hardness / _PLACE_MAX

    def digest(self) -> int:
        """Return a number of 64 bits that stands for the table."""
        digest = xxhash.xxh3_64()
        for column in (self.score, self.hardness, self.num_seen):
            digest.update(column.astype(column.dtype.newbyteorder("<")).data)
        return digest.intdigest()


def check_score(step: StepLosses, options: Importance) -> None:
    """Raise if the user's score function has no scores for the losses of a step.

    For the process in which the training loop runs, where its author sees the error.
    """
    if callable(options.score):
        losses = step.losses[np.isfinite(step.losses)]
        _points(losses, np.arange(len(losses)), options)


def _points(losses: Floats, ranks: Ids, options: Importance) -> Ids:
    if options.score == "loss-rank":
        if 1 < len(ranks) < _RANKS_MIN:
            # In a small batch ranks differ too little to say anything: they are spread.
            ranks = ranks * (_RANKS_MIN - 1) // (len(ranks) - 1)
        points = np.log(_RANK_OFFSET + ranks) * LOG_RANK_POINTS
        return np.asarray(np.rint(points), np.int64)
    if callable(options.score):
        losses = np.asarray(options.score(losses), np.float32)
        if losses.shape != ranks.shape or not (np.isfinite(losses) & (losses >= 0)).all():
            raise OptionError(
                "the score function must return one finite number from 0 on for each of the "
                f"{len(ranks)} losses, got {losses!r}"
            )
    points = np.clip(np.float64(LOSS_POINTS) * losses, 0, _POINTS_MAX)
    return np.asarray(np.rint(points), np.int64)
