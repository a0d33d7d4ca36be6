"""Importance sampling as the training process has it: scores, losses, and what they tell.

The scores here are the run's: they go into its state, and an engine that is started again begins
with them. Draws are made where batches are planned.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.job import Slot
from penstock.engine.opening import rendezvous_for
from penstock.errors import OptionError, StateError
from penstock.loader.losses import AloneExchange, LossExchange, ObservedLosses
from penstock.order.importance import ImportanceCourse, ImportanceOrder, ScoreTable, StepLosses

if TYPE_CHECKING:
    from penstock.world import World

_HARD = 0.98
"""Samples that are in the hardest fiftieth of their batches, again and again."""
_SEEN_MIN = 4
_FIELDS = ("score", "hardness", "num_seen", "sizes", "ids", "losses")


class LoaderImportance:
    """What a loader knows about the importance of its samples: `loader.importance`."""

    def __init__(self, order: ImportanceOrder, meets_at: bool | str) -> None:
        self.order = order
        self._meets_at = meets_at
        self._world: World | None = None
        self._global_batch_size = 0
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
        if part != (0, 1):
            raise OptionError(
                "importance sampling needs the losses of every batch, and worker processes of a "
                "DataLoader see only some; iterate over the Loader itself"
            )
        window = order.num_samples // order.num_windows
        if window < min(global_batch_size, order.num_samples):
            wide = min(order.num_samples, 4 * global_batch_size)
            raise OptionError(
                f"a window of {window:,} draws is smaller than a global batch of "
                f"{global_batch_size:,}; give window={wide}"
            )
        if (world, global_batch_size) != (self._world, self._global_batch_size):
            self._world, self._global_batch_size = world, global_batch_size
            self._observed.exchange = None
        first = order.window_at(*start) if start[1] < order.num_samples else None
        now = self._course.window
        if first is not None and now not in (first - 1, first):
            self._course.move_to(first)

    def forward_to(self, forward: Callable[[Sequence[StepLosses], bool], None]) -> None:
        """Name who draws, for the iteration that begins."""
        self._observed.forward = forward

    def scores(self) -> Mapping[str, Any]:
        """Return the state of the course."""
        return self._course.to_state()

    def delivered(self, slot: Slot) -> None:
        """Take note that a batch is handed to the training loop."""
        self._observed.delivered(slot)

    def observe(self, batch: Any, losses: Any) -> None:
        """Take note of the losses of a batch."""
        self._observed.observe(batch, losses)

    def _exchange(self) -> LossExchange:
        world = self._world
        if world is None or world.num_ranks == 1:
            return AloneExchange()
        share_max = -(-self._global_batch_size // world.num_ranks)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            module = importlib.import_module("penstock.torch.losses")
            exchange: LossExchange = module.GroupExchange(world, share_max)
            return exchange
        from penstock.loader.store_exchange import StoreExchange
        from penstock.peers.runs import run_name

        windows = 3 * self.order.num_samples // self.order.num_windows
        place = rendezvous_for(self._meets_at, world)
        name = f"{run_name()}/{world.name or 'world'}"
        return StoreExchange(place, world, name, 8 + windows // self._global_batch_size)

    # -- states ------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all scores, as tensors where torch is in use: `torch.load` takes those."""
        state = self._course.to_state()
        queued = self._observed.queued()
        state["queued"] = [len(step.ids) for step in queued]
        state["ids"] = np.concatenate([state["ids"], *(step.ids for step in queued)])
        state["losses"] = np.concatenate([state["losses"], *(step.losses for step in queued)])
        torch = sys.modules.get("torch")
        if torch is not None:
            for name in _FIELDS:
                signed = state[name].dtype.str.replace("u", "i") if name != "num_seen" else "|u1"
                state[name] = torch.from_numpy(state[name].view(signed))
        return state

    def load(self, state: Any) -> None:
        """Go on with saved scores."""
        if not isinstance(state, Mapping):
            raise StateError(
                "the saved state has no scores, though its order is one by importance; it is "
                "damaged, or was made by hand"
            )
        state = dict(state)
        kinds = {"score": np.uint32, "hardness": np.uint16}
        for name in _FIELDS:
            column = np.asarray(state[name])
            state[name] = column.view(kinds[name]) if name in kinds else column
        queued = list(state.pop("queued"))
        cut = len(state["ids"]) - sum(queued)
        edges = cut + np.cumsum(queued)[:-1].astype(np.int64)
        ids, losses = (np.split(state[n][cut:], edges - cut) for n in ("ids", "losses"))
        state["ids"], state["losses"] = state["ids"][:cut], state["losses"][:cut]
        self._take(ImportanceCourse.from_state(self.order, state))
        steps = [StepLosses(i, x) for i, x in zip(ids, losses, strict=True) if len(i)]
        self._observed.restore(steps)

    # -- for people --------------------------------------------------------------------------

    @property
    def num_observed(self) -> int:
        """Batches whose losses this process has reported."""
        return self._observed.num_observed

    def table(self) -> ScoreTable:
        """Return the scores of all samples, with everything that was observed."""
        return self._course.latest_table()

    def hardest(self, k: int = 10) -> Ints:
        """Return the ids of the samples that are hardest on average, hardest first."""
        table = self.table()
        known = np.flatnonzero(table.num_seen)
        order = np.argsort(-table.hardness[known].astype(np.int64), kind="stable")
        return known[order[:k]]

    def suspects(self) -> Ints:
        """Return the ids of samples that stay hardest, hardest first.

        They were scored four times or more, and were among the hardest 2 % of their batches on
        average. Wrong labels and broken inputs look like that; so do rare, valid samples.
        """
        table = self.table()
        is_suspect = (table.hardness >= _HARD * 65535) & (table.num_seen >= _SEEN_MIN)
        ids = np.flatnonzero(is_suspect)
        return ids[np.argsort(-table.hardness[ids].astype(np.int64), kind="stable")]

    def __repr__(self) -> str:
        table = self.table()
        scored = float((table.num_seen > 0).mean())
        return (
            f"LoaderImportance(window {self._course.window}, {self.num_observed:,} batches "
            f"observed, {scored:.0%} of {len(table.score):,} samples scored)"
        )
