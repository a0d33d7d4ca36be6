"""The engine, which makes the batches of one loader.

It opens tiers, meets the other nodes, and begins runs over the stream. The training process has an
engine inside of it (`workers="here"`), or talks to one in a process of its own (`engine.process`).
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.engine.build import StreamSpan, make_run
from penstock.engine.draw_summary import DrawSummary
from penstock.engine.drawing import DrawnRun, SharedCourse
from penstock.engine.opening import (
    MeetingOptions,
    OpenedTiers,
    by_home,
    number_of_meeting,
    open_here,
)
from penstock.engine.options import LoaderOptions
from penstock.engine.run_context import RunContext
from penstock.engine.runner import Runner
from penstock.engine.stats import ClusterStats, Counters
from penstock.engine.stream import BatchStream, stream_of
from penstock.engine.tracing import Tracing
from penstock.errors import OptionError
from penstock.flow.live import LiveRates
from penstock.machine import default_machine_path, load_machine
from penstock.order import order_hash
from penstock.order.importance import ImportanceCourse, ImportanceOrder, StepLosses
from penstock.trace import Recorder, recorder_of
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.peers.rendezvous import Rendezvous
    from penstock.engine.shared import SharedPool
    from penstock.engine.workers import Workers

_log = logging.getLogger("penstock.loader")


@dataclass(frozen=True, kw_only=True)
class EngineResources:
    """What only an engine in a process of its own has: shared memory and workers."""

    pool: SharedPool
    workers: Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The span of an iteration, and the state that it begins with."""

    world: World
    span: StreamSpan
    is_replacement: bool = False
    """Whether the engine replaces a dead one: the other nodes do not expect it, so it does not meet
    them."""
    scores: Mapping[str, Any] | None = None
    """State of the `ImportanceCourse`, where the order depends on losses."""
    training_pid: int = field(default_factory=os.getpid)
    """The process that iterates."""


class Engine:
    """Makes batches; nothing is open before the first run begins."""

    def __init__(
        self,
        options: LoaderOptions,
        *,
        rendezvous: Callable[[World], Rendezvous] | None = None,
        count_meeting: Callable[[World], int] = number_of_meeting,
        resources: EngineResources | None = None,
    ) -> None:
        self.options = options
        self.counters = Counters()
        self._rendezvous = rendezvous
        self._count_meeting = count_meeting
        self._resources = resources
        self._opened: OpenedTiers | None = None
        self._seen = ClusterStats()
        self._live: LiveRates | None = None
        self._world = World()
        self._drawn: DrawnRun | None = None
        self._tracing: Tracing | None = None
        # Held while windows are drawn, so that a summary does not copy half of one.
        self._drawing = threading.Lock()

    def begin(self, begin: RunStart) -> Runner:
        """Return the runner of an iteration; it is not started yet."""
        self._world = begin.world
        if self.options.trace is not None:
            # In the training process the recorder exists already, with the role of that process.
            rank = begin.world.rank
            self.counters.recorder = recorder_of(self.options.trace, role="engine", rank=rank)
        self._open(begin)
        opened = self._opened
        if self.counters.recorder is not None and self._tracing is None:
            self._tracing = self._begin_tracing(self.counters.recorder, begin)
        context = RunContext(
            counters=self.counters,
            live=self.live_rates(),
            local_tiers=None if opened is None else opened.local_tiers,
            cluster=None if opened is None else opened.cluster,
        )
        course = self._course(begin)
        stream = self.stream(begin.world, course)
        runner = make_run(self.options, stream, begin.span, context, self._resources)
        self._drawn = None
        if course is not None:
            if self._seen.draws is None:
                self._seen.draws = DrawSummary()
            span = begin.span
            self._drawn = DrawnRun(
                stream, span.start, span.end_epoch, runner.known, self._seen.draws
            )
        return runner

    def _begin_tracing(self, recorder: Recorder, begin: RunStart) -> Tracing:
        workers = None if self._resources is None else self._resources.workers.pids
        cluster = None if self._opened is None else self._opened.cluster
        tracing = Tracing(
            recorder,
            pids=partial(_pids, begin.training_pid, workers),
            world=begin.world,
            clock=None if cluster is None else cluster.clock_of_first,
        )
        tracing.start(self.seen().tiers)
        # For an engine that nobody closes: the sampling thread does not keep it alive.
        weakref.finalize(self, tracing.stop)
        return tracing

    def _course(self, begin: RunStart) -> SharedCourse | None:
        if not isinstance(self.options.order, ImportanceOrder):
            return None
        assert begin.scores is not None
        return SharedCourse.from_state(self.options.order, begin.scores)

    def observed(self, steps: Sequence[StepLosses], closes_window: bool) -> None:
        """Take over losses that the training loop has observed."""
        if self._drawn is not None:
            with self._drawing:
                self._drawn.observed(steps, closes_window=closes_window)

    def stream(self, world: World, course: ImportanceCourse | None = None) -> BatchStream:
        """Return the stream of batches of a rank."""
        opened = self._opened
        assign = None
        if self.options.assignment == "locality" and opened is not None and opened.cluster:
            assign = by_home(opened.local_tiers, opened.cluster, self.options.dataset)
        return stream_of(self.options, world, assign, course)

    def _open(self, begin: RunStart) -> None:
        """Open the tiers and meet the other nodes, in the first iteration of this process."""
        options = self.options
        if not (options.tiers or options.peers):
            return
        if self._opened is not None and self._opened.pid == os.getpid():
            return
        if begin.is_replacement and options.assignment == "locality":
            raise OptionError(
                "assignment='locality' goes by where the nodes agreed to keep samples, and this "
                "engine was started again without them; restart the job from its last state"
            )
        self._opened = open_here(
            options.dataset,
            options.wishes,
            MeetingOptions(
                where=False if begin.is_replacement else options.meets_at,
                world=begin.world,
                count_meeting=self._count_meeting,
                rendezvous=self._rendezvous,
                num_samples=options.order.num_samples,
                must_match={
                    "the order of samples": f"{options.order.mode}:{order_hash(options.order)}",
                    "the seed": str(options.seed),
                },
                moving_order=order_hash(options.order)
                if options.order.mode == "importance"
                else "",
            ),
            self.counters,
        )
        if self._seen.warm_bytes is None:
            warm_bytes = self._opened.local_tiers.warm_bytes
            if self._opened.cluster is not None:
                warm_bytes *= begin.world.num_nodes  # About as much lies on the others.
            self._seen.warm_bytes = warm_bytes

    def live_rates(self) -> LiveRates | None:
        """Return the rates that refine the machine's file, if there is such a file."""
        path = default_machine_path()
        if self._live is None and path.exists():
            try:
                self._live = LiveRates(load_machine(path))
            except OptionError as error:
                _log.warning("%s", error)
        return self._live

    @property
    def run_id(self) -> str | None:
        """Return the name that the nodes of this run have agreed on, once they have met."""
        cluster = None if self._opened is None else self._opened.cluster
        return None if cluster is None else cluster.run_id.hex()

    def seen(self) -> ClusterStats:
        """Return the state of tiers and other nodes; the latest one, if they are closed."""
        opened, seen = self._opened, self._seen
        if opened is not None and opened.pid == os.getpid():
            cluster = opened.cluster
            seen.tiers = opened.local_tiers.stats()
            seen.cache_hits = opened.local_tiers.cache_hits()
            seen.cache_bytes = sum(t.capacity_bytes for t in seen.tiers) * self._world.num_nodes
            if cluster is not None:
                seen.peers, seen.events = cluster.stats(), tuple(cluster.log)
                seen.cache_bytes = cluster.capacity_bytes
            seen.kept = opened.local_tiers.kept(seen.cache_bytes)
        with self._drawing:
            return replace(seen, draws=copy.deepcopy(seen.draws))

    @property
    def opened_tiers(self) -> object:
        """An object that must live as long as a run."""
        return self._opened

    def close(self) -> None:
        """Close the tiers and leave the other nodes."""
        seen = self.seen() if self._opened is not None or self._tracing is not None else None
        if self._tracing is not None and seen is not None:
            self._tracing.end(seen.tiers)
            self._tracing = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _pids(training_pid: int, workers: Callable[[], list[int]] | None) -> list[int]:
    """Return the processes of a run: the training process, this one, its workers."""
    own = dict.fromkeys([training_pid, os.getpid()])
    return [*own, *(workers() if workers is not None else ())]
