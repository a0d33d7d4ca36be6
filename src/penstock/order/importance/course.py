"""The windows that are known, and the losses that later ones wait for.

One course lives where batches are planned, and one in the training process, whose course is the one
that is saved. Both learn the same losses in the same order, so both hold the same tables.

    course = ImportanceCourse(order)
    course.ids(epoch, start, stop)          # windows 0 and 1 are known from the beginning
    course.observe(StepLosses(ids, losses))
    course.close_window()                   # window 0 is over: window 2 is known
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.errors import StateError
from penstock.order.importance.options import Floats
from penstock.order.importance.order import DELAY, ImportanceOrder, WindowDraws
from penstock.order.importance.scores import ScoreTable, StepLosses
from penstock.order.keys import Ids
from penstock.order.orders import Description, check_range

_FORMAT = 1


class ImportanceCourse:
    """An importance order as far as it is known."""

    def __init__(self, order: ImportanceOrder, window: int = 0) -> None:
        """Begin in a window, with nothing scored."""
        self.order = order
        self._table = ScoreTable(order.num_ids)
        self._window = window
        self._steps: list[list[StepLosses]] = [[], []]
        """Losses of the window before the present one, and of the present one: not in the table
        yet, because the present window was drawn without them."""
        self._closed: list[list[StepLosses]] = []
        """Losses of windows that the table lacks; learned when the table is asked for."""
        self._known: dict[int, WindowDraws] = {}

    # -- where it stands ---------------------------------------------------------------------

    @property
    def window(self) -> int:
        """The window that is trained on."""
        return self._window

    @property
    def table(self) -> ScoreTable:
        """The scores that the present window was drawn from."""
        for steps in self._closed:
            self._table.learn(steps, self.order.options)
        self._closed.clear()
        return self._table

    def latest_table(self) -> ScoreTable:
        """Return the scores with all losses that were observed."""
        table = self.table.copy()
        for steps in self._steps:
            table.learn(steps, self.order.options)
        return table

    @property
    def known_windows(self) -> range:
        """The windows whose draws are known."""
        return range(self._window, self._window + DELAY)

    # -- losses ------------------------------------------------------------------------------

    def observe(self, step: StepLosses) -> None:
        """Take note of the losses of a step of the present window."""
        self._steps[-1].append(step)

    def take_back(self, num_steps: int) -> list[StepLosses]:
        """Return the latest steps of the present window, and forget them."""
        steps = self._steps[-1]
        cut = max(0, len(steps) - num_steps)
        self._steps[-1] = steps[:cut]
        return steps[cut:]

    def close_window(self) -> None:
        """Go on to the next window; the one after it can be drawn now."""
        # The window that ends here is kept for one window more: whoever fills caches may still be
        # going through its draws.
        self._known.pop(self._window - 1, None)
        before, now = self._steps
        self._closed.append(before)
        if len(self._closed) > self.order.num_windows:
            _ = self.table  # Learn them now: a course that draws nothing would keep all losses.
        self._steps = [now, []]
        self._window += 1

    def move_to(self, window: int) -> None:
        """Go on in another window, with everything that was observed."""
        self._table = self.latest_table()
        self._steps, self._window = [[], []], window
        self._known.clear()

    # -- draws -------------------------------------------------------------------------------

    def draws(self, window: int) -> WindowDraws:
        """Return the draws of the present window or of the next one."""
        assert window in self.known_windows or window in self._known, (window, self._window)
        if window not in self._known:
            table, drift = self.table, None
            if window > self._window:
                table = table.copy()
                drift = table.learn(self._steps[0], self.order.options)
            drawn = self.order.draws(window, table)
            epoch, _, _ = self.order.span(window)
            self._known[window] = replace(drawn, epoch=epoch, drift=drift)
        return self._known[window]

    # -- as an order -------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """As the order."""
        return self.order.mode

    @property
    def num_samples(self) -> int:
        """Positions in one epoch."""
        return self.order.num_samples

    @property
    def seed(self) -> int:
        """As the order."""
        return self.order.seed

    def describe(self) -> Description:
        """As the order."""
        return self.order.describe()

    def is_known(self, epoch: int, stop: int) -> bool:
        """Return whether everything before a position of an epoch is known."""
        return stop <= 0 or self.order.window_at(epoch, stop - 1) < self.known_windows.stop

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions of an epoch that are known."""
        check_range(self.order, epoch, start, stop)
        ids: Ids = self._joined(epoch, start, stop, "ids", np.int64)
        return ids

    def weights(self, epoch: int, start: int, stop: int) -> Floats:
        """Return the factors of the losses at positions of an epoch that are known."""
        check_range(self.order, epoch, start, stop)
        weights: Floats = self._joined(epoch, start, stop, "weights", np.float32)
        return weights

    def digest_at(self, epoch: int, position: int) -> int:
        """Return what stands for the scores that a position was drawn from."""
        return self.draws(self.order.window_at(epoch, int(position))).digest

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """As the order: refuse."""
        return self.order.positions(epoch, ids)

    def _joined(self, epoch: int, start: int, stop: int, column: str, kind: Any) -> Any:
        parts = [np.empty(0, kind)]
        while start < stop:
            window = self.order.window_at(epoch, start)
            _, first, last = self.order.span(window)
            until = min(stop, last)
            parts.append(getattr(self.draws(window), column)[start - first : until - first])
            start = until
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    # -- states ------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return everything that is needed to go on, as NumPy arrays and plain values."""
        table = self.table
        steps = [step for steps in self._steps for step in steps]
        return {
            "format": _FORMAT,
            "window": self._window,
            "score": table.score.copy(),
            "hardness": table.hardness.copy(),
            "num_seen": table.num_seen.copy(),
            "steps": [len(steps) for steps in self._steps],
            "sizes": np.array([len(step.ids) for step in steps], np.int64),
            "ids": np.concatenate([np.empty(0, np.int64), *(step.ids for step in steps)]),
            "losses": np.concatenate([np.empty(0, np.float32), *(step.losses for step in steps)]),
        }

    @classmethod
    def from_state(cls, order: ImportanceOrder, state: Mapping[str, Any]) -> Self:
        """Return the course of a saved state, or raise if it is damaged."""
        format_, num_ids = state.get("format"), len(state.get("score", ()))
        if format_ != _FORMAT or num_ids != order.num_ids:
            raise StateError(
                f"the saved scores have format {format_!r} and {num_ids:,} samples, this run needs "
                f"format {_FORMAT} and {order.num_ids:,}; load a state of the same data set, or "
                "begin a new run"
            )
        try:
            return cls._restored(order, state)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the saved scores are damaged ({type(error).__name__}: {error}); load another "
                "state, or begin a new run"
            ) from error

    @classmethod
    def _restored(cls, order: ImportanceOrder, state: Mapping[str, Any]) -> Self:
        course = cls(order, int(state["window"]))
        for name in ("score", "hardness", "num_seen"):
            column = getattr(course._table, name)
            column[:] = np.asarray(state[name])
        sizes = np.asarray(state["sizes"], np.int64)
        ids, losses = np.asarray(state["ids"], np.int64), np.asarray(state["losses"], np.float32)
        before, now = state["steps"]
        if before + now != len(sizes) or not len(ids) == len(losses) == sizes.sum():
            raise ValueError(
                f"{before} + {now} steps of {sizes.sum()} samples have {len(sizes)} sizes, "
                f"{len(ids)} ids and {len(losses)} losses"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < order.num_ids:
            raise ValueError(f"ids reach from {ids.min()} to {ids.max()}, of {order.num_ids}")
        edges = [0, *np.cumsum(sizes).tolist()]
        steps = [StepLosses(ids[a:b], losses[a:b]) for a, b in pairwise(edges)]
        course._steps = [steps[:before], steps[before:]]
        return course
