"""Importance sampling in the training process: scores, losses, and reports about them.

The scores here are those of the run: they go into its state, and an engine that replaces a dead one
begins with them. The engine makes the draws, when it plans batches.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.draw_summary import DrawSummary
from penstock.engine.job import BatchSlot
from penstock.engine.opening import is_data_worker, number_of_meeting, rendezvous_for
from penstock.engine.stats import ClusterStats
from penstock.errors import OptionError, StateError
from penstock.loader.losses import LossExchange, ObservedLosses, SingleRankExchange
from penstock.order.importance import ImportanceCourse, ImportanceOrder, ScoreTable, StepLosses
from penstock.order.importance.scores import BY_LOSS

if TYPE_CHECKING:
    from penstock.world import World

_SUSPECTS_SHARE = 0.02
_HARDNESS_MIN = 0.9
"""The mean hardness of a sample whose place in its batches is chance stays below this."""
_SEEN_MIN = 4
_FIELDS = ("score", "hardness", "num_seen", "sizes", "ids", "losses")


class SavedImportance(NamedTuple):
    """The scores of a saved state."""

    course: ImportanceCourse
    queued: list[StepLosses]


class LoaderImportance:
    """The scores of a loader's samples: `loader.importance`."""

    def __init__(self, order: ImportanceOrder, meets_at: bool | str) -> None:
        self.order = order
        self._meets_at = meets_at
        self._world: World | None = None
        self._global_batch_size = 0
        self.seen: Callable[[], ClusterStats] = ClusterStats
        """Returns the state of the engine; set when an iteration begins."""
        self._take(ImportanceCourse(order))

    def _take(self, course: ImportanceCourse) -> None:
        self._course = course
        self._observed = ObservedLosses(course, self._exchange)

    # -- for the loader ----------------------------------------------------------------------

    def begin(
        self,
        start: tuple[int, int],
        world: World,
        global_batch_size: int,
        part: tuple[int, int],
    ) -> None:
        """Prepare for an iteration from a place on."""
        order = self.order
        if part != (0, 1) or is_data_worker():
            raise OptionError(
                "importance sampling needs the losses of every batch, and worker processes of a "
                "DataLoader do not hear of them; iterate over the penstock.Loader itself, in the "
                "training process"
            )
        window = order.num_samples // order.num_windows
        if window < min(global_batch_size, order.num_samples):
            wide = min(order.num_samples, 4 * global_batch_size)
            raise OptionError(
                f"a window of {window:,} draws is smaller than a global batch of "
                f"{global_batch_size:,}; give window={wide}, or go on with a saved state and a "
                f"global batch of at most {window:,}"
            )
        # The queue belongs to windows of the iteration before; it must not grow when loops are left
        # early again and again.
        self._observed.take_all()
        if (world, global_batch_size) != (self._world, self._global_batch_size):
            self._world, self._global_batch_size = world, global_batch_size
            self._observed.exchange = None
        first = order.window_at(*start) if start[1] < order.num_samples else None
        now = self._course.window
        if first is not None and now not in (first - 1, first):
            with self._observed.changing:
                self._course.move_to(first)

    def forward_to(self, forward: Callable[[Sequence[StepLosses], bool], None]) -> None:
        """Pass losses on to this method, for the iteration that begins."""
        # Weak, because a run refers to these scores: a cycle would keep a loader that nobody holds.
        method = weakref.WeakMethod(forward)

        def told(steps: Sequence[StepLosses], closes_window: bool) -> None:
            found = method()
            if found is not None:
                found(steps, closes_window)

        self._observed.forward = told

    def scores(self, begin_anew: Callable[[], None] = lambda: None) -> Mapping[str, Any]:
        """Return the state of the course; `begin_anew` is called before it can change again."""
        with self._observed.changing:
            begin_anew()
            return self._course.to_state()

    def delivered(self, slot: BatchSlot) -> None:
        """Record that a batch is handed to the training loop."""
        self._observed.delivered(slot)

    def observe(self, batch: Any, losses: Any) -> None:
        """Take the losses of a batch."""
        self._observed.observe(batch, losses)

    def _exchange(self) -> LossExchange:
        world = self._world
        if world is None or world.num_ranks == 1:
            return SingleRankExchange()
        share_max = -(-self._global_batch_size // world.num_ranks)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            module = importlib.import_module("penstock.loader.torch.losses")
            exchange: LossExchange = module.GroupExchange(world, share_max)
            return exchange
        from penstock.engine.peers.runs import run_name
        from penstock.loader.store_exchange import StoreExchange

        windows = 3 * self.order.num_samples // self.order.num_windows
        place = rendezvous_for(self._meets_at, world)
        number = number_of_meeting(world)
        name = f"{run_name()}/{world.name or 'world'}/losses/{number}"
        return StoreExchange(place, world, name, 8 + windows // self._global_batch_size)

    # -- states ------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all scores, as tensors where torch is in use: `torch.load` takes those."""
        queued = self._observed.queued()  # First: it may wait for other ranks.
        state = dict(self.scores())
        before, now = state["steps"]
        state["steps"], state["queued"] = [before, now + len(queued)], len(queued)
        sizes = np.array([len(step.ids) for step in queued], np.int64)
        state["sizes"] = np.concatenate([state["sizes"], sizes])
        state["ids"] = np.concatenate([state["ids"], *(step.ids for step in queued)])
        state["losses"] = np.concatenate([state["losses"], *(step.losses for step in queued)])
        torch = sys.modules.get("torch")
        if torch is not None:
            for name in _FIELDS:
                signed = state[name].dtype.str.replace("u", "i") if name != "num_seen" else "|u1"
                state[name] = torch.from_numpy(state[name].view(signed))
        return state

    def load(self, saved: SavedImportance) -> None:
        """Go on with saved scores."""
        self._take(saved.course)
        self._observed.restore(saved.queued)

    @staticmethod
    def saved(order: ImportanceOrder, state: Any) -> SavedImportance:
        """Return the scores of a state, or raise if it is damaged."""
        if not isinstance(state, Mapping):
            raise StateError(
                "the saved state has no scores, though its order is one by importance; it is "
                "damaged, or was made by hand"
            )
        state = {name: _array_of(value) for name, value in state.items()}
        course = ImportanceCourse.from_state(order, state)
        return SavedImportance(course, course.take_back(int(state.get("queued", 0))))

    # -- for people --------------------------------------------------------------------------

    @property
    def num_observed(self) -> int:
        """Batches whose losses this process has reported."""
        return self._observed.num_observed

    def table(self) -> ScoreTable:
        """Return the scores of all samples, with everything that was observed.

        Waits for losses of this rank's latest batches that other ranks have not reported yet.
        """
        queued = self._observed.queued()
        with self._observed.changing:
            table = self._course.latest_table()
        table.learn(queued, self.order.options)
        return table

    def summary(self, seen: DrawSummary) -> tuple[DrawSummary, tuple[str, ...]]:
        """Return the windows that were trained on, and sentences about them."""
        window = self._course.window
        used = seen.until(window, window // self.order.num_windows)
        return used, tuple(used.lines(self.order.num_ids, self.num_observed))

    def hardest(self, k: int = 10) -> Ints:
        """Return the ids of the samples that are hardest on average, hardest first."""
        table = self.table()
        known = np.flatnonzero(table.num_seen)
        difficulty = table.difficulty(self.order.options)[known]
        return known[np.argsort(-difficulty, kind="stable")[:k]]

    def suspects(self) -> Ints:
        """Return the ids of samples that stay hardest, hardest first.

        They were scored four times or more, and are among the hardest 2 % of all samples. Wrong
        labels and broken inputs look like that; so do rare, valid samples.
        """
        table, options = self.table(), self.order.options
        difficulty, is_known = table.difficulty(options), table.num_seen > 0
        if not is_known.any():
            return np.empty(0, np.int64)
        middle, least = np.quantile(difficulty[is_known], (0.5, 1 - _SUSPECTS_SHARE))
        if options.score not in BY_LOSS:
            least = max(least, _HARDNESS_MIN)
        is_hard = (difficulty >= least) & (difficulty > middle)  # Not if all are alike.
        ids = np.flatnonzero(is_hard & (table.num_seen >= _SEEN_MIN))
        return ids[np.argsort(-difficulty[ids], kind="stable")]

    def report(self, path: str | Path) -> Path:
        """Write a page about scores, windows, coverage and hard samples; return its path.

        One HTML file that needs nothing else. The scores are the same on all ranks, so one rank is
        enough; windows and epochs are those since the loader was made.
        """
        from penstock.loader.importance_page import ImportanceView, importance_html

        order, seen = self.order, self.seen()
        epoch, _, _ = order.span(self._course.window)
        next_window = max(self._course.window + 2, order.options.warmup * order.num_windows)
        view = ImportanceView(
            order=order,
            table=self.table(),
            draws=(seen.draws or DrawSummary()).until(self._course.window, epoch),
            hits=seen.cache_hits,
            num_observed=self.num_observed,
            hardest=self.hardest(20),
            suspects=self.suspects(),
            next_draws=order.draws(next_window, self.table()),
        )
        path = Path(path)
        path.write_text(importance_html(view), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        with self._observed.changing:
            table = self._course.latest_table()  # Does not wait for other ranks.
        scored = float((table.num_seen > 0).mean())
        return (
            f"LoaderImportance(window {self._course.window}, {self.num_observed:,} batches "
            f"observed, {scored:.0%} of {len(table.score):,} samples scored)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has the same scores, and its own way to other ranks."""
        return {"order": self.order, "meets_at": self._meets_at, "scores": self.to_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["order"], state["meets_at"])  # type: ignore[misc]
        self.load(self.saved(self.order, state["scores"]))


def _array_of(value: Any) -> Any:
    """Return a tensor on any device as an array; anything else unchanged."""
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    kinds = {"<i4": np.uint32, "<i2": np.uint16}  # Saved as signed: torch had no such types.
    kind = kinds.get(array.dtype.str) if isinstance(array, np.ndarray) else None
    return array if kind is None else array.view(kind)
