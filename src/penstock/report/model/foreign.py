"""Loaders that work like torch's DataLoader, replayed in virtual time.

The rules that are replayed: batches go to workers in turn; `prefetch_factor` batches a worker are
asked for ahead, one more for each that is taken; the training loop gets batches in their order,
whichever is finished first. A worker makes one batch after the other: it waits for the store, its
bytes share the store's bandwidth, decoding shares the cores of the node. After every step all ranks
wait for the slowest.

Of a large job some nodes are replayed, with their share of the store; the ranks that are not have
their part in the barrier by a draw from how late ranks were (`_Barrier`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.report.model.constants import DrawnTimes, MakingCosts, RunConstants
from penstock.report.model.observed import step_s_of
from penstock.report.model.played import NO_CHANCE, RunDeviation
from penstock.report.model.settings import RunSettings
from penstock.report.model.store_fit import Floats, StoreFit
from penstock.report.model.what_if import WhatIf
from penstock.simulate.virtual import SharedPipe, VirtualTime

RANKS_MAX = 16
"""Ranks that are replayed one by one."""
RANK_STEPS_MAX = 1600
"""Steps of all ranks together that are replayed: a second or two."""
STEPS_MAX = 400
"""Steps that are replayed; a longer epoch goes on as its second half did."""
_STEPS_TOTAL, _REPEATS_MAX = 800, 10
_PIECES, _PIECES_MANY, _MANY_RANKS = 8, 2, 5
"""Parts of a batch whose waiting, transfer and decoding take turns: at most, and of many ranks."""
_WITHOUT_LIMIT = 1e15


@dataclass(frozen=True, kw_only=True)
class ReplayedEpoch:
    """An epoch as it was replayed."""

    ends_s: Floats
    """When each step ended on all ranks, from the first question on."""
    stall_s: float
    """That steps waited for batches: each until its last rank had its own."""
    first_s: float
    """Of it, until the first batch was taken on all ranks."""
    busy_cores: float
    """Cores of a node that worked, mean."""
    chance: RunDeviation = NO_CHANCE

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return step_s_of(self.ends_s)

    @property
    def stall_share(self) -> float:
        """Share of the time after the first batch that steps wait for batches."""
        rest_s = float(self.ends_s[-1]) - self.first_s
        return min(1.0, max(0.0, self.stall_s - self.first_s) / rest_s) if rest_s > 0 else 0.0

    def epoch_s(self, num_steps: int) -> float:
        """Return the time of an epoch of so many steps."""
        return float(self.ends_s[-1]) + (num_steps - len(self.ends_s)) * self.step_s


def replayed(
    constants: RunConstants,
    settings: RunSettings,
    what_if: WhatIf,
    *,
    miss_share: float = 1.0,
    seed: int = 0,
) -> ReplayedEpoch:
    """Replay an epoch of a run whose samples come from the store with some share of misses."""
    making = constants.making_for(what_if)
    assert making is not None, "a replay needs to know what making a batch takes"
    job = _ReplayedJob(constants, settings, what_if, making, miss_share)
    # One replay of a short epoch is one draw; a forecast is about the mean of many.
    steps = min(_STEPS_TOTAL, RANK_STEPS_MAX // job.num_ranks)
    repeats = max(1, min(_REPEATS_MAX, steps // job.num_steps))
    several = [_Epoch(job, seed + number).run() for number in range(repeats)]
    return ReplayedEpoch(
        ends_s=np.mean([one.ends_s for one in several], axis=0),
        stall_s=float(np.mean([one.stall_s for one in several])),
        first_s=float(np.mean([one.first_s for one in several])),
        busy_cores=float(np.mean([one.busy_cores for one in several])),
        chance=RunDeviation.of(
            np.array([one.step_s for one in several]),
            np.array([one.ends_s[-1] for one in several]),
            np.array([one.stall_share for one in several]),
        ),
    )


class _ReplayedJob:
    """What all ranks have in common."""

    def __init__(
        self,
        constants: RunConstants,
        settings: RunSettings,
        what_if: WhatIf,
        making: MakingCosts,
        miss_share: float,
    ) -> None:
        self.settings, self.making, self.miss_share = settings, making, miss_share
        self.nodes = max(1, min(settings.nodes, RANKS_MAX // settings.ranks_per_node))
        self.computes_s = constants.computed_s(settings.batch_size, what_if)
        self.cpu_share = constants.compute_cpu_share
        self.hand_over_s = constants.hand_over_s * what_if.hand_over_factor
        self.deliver_s = constants.deliver_s * what_if.hand_over_factor
        self.store: StoreFit | None = constants.store_for(what_if)
        self.num_ranks = self.nodes * settings.ranks_per_node
        """Ranks that are replayed."""
        self.num_steps = min(settings.steps_per_epoch, self._steps_max())
        self.batch_bytes = settings.batch_size * making.sample_bytes * miss_share

    def _steps_max(self) -> int:
        ahead = self.settings.workers * self.settings.prefetch_factor
        return max(min(STEPS_MAX, RANK_STEPS_MAX // self.num_ranks), 2 * ahead, 40)

    @property
    def shares_cores(self) -> bool:
        """Whether there may be more to do than cores to do it."""
        busy = self.settings.ranks_per_node * (self.settings.workers + 1)
        return busy > self.settings.cores

    @property
    def store_bytes_s(self) -> float:
        """What the store gives the nodes that are replayed."""
        if self.store is None or math.isinf(self.store.bytes_s):
            return math.inf
        return self.store.bytes_s * self.nodes / self.settings.nodes


class _NodeCores:
    """Cores that the ranks of a node share."""

    def __init__(self, time: VirtualTime, job: _ReplayedJob) -> None:
        self._time = time
        self._cores = (
            SharedPipe(time, job.settings.cores, each_bytes_s=1.0) if job.shares_cores else None
        )
        self.busy_s = 0.0

    def work(self, seconds: float, call: Callable[[], None]) -> None:
        """Have a core work for so long; others may want it too."""
        self.busy_s += seconds
        if self._cores is None:
            self._time.after(seconds, call)
        else:
            self._cores.send(seconds, call)


class _Epoch:
    """One epoch of all ranks that are replayed."""

    def __init__(self, job: _ReplayedJob, seed: int) -> None:
        self.job, self.time = job, VirtualTime()
        total = job.store_bytes_s
        own = job.store.connection_bytes_s if job.store else _WITHOUT_LIMIT
        self._own_bytes_s = min(own, _WITHOUT_LIMIT)
        self._pipe = (
            None
            if math.isinf(total)
            else SharedPipe(self.time, total, each_bytes_s=min(self._own_bytes_s, total))
        )
        self.rng = np.random.default_rng([seed, 1])
        self._barrier = _Barrier(job, self.rng)
        self.nodes = [_NodeCores(self.time, job) for _ in range(job.nodes)]
        self.ranks = [
            _ReplayedRank(
                self, node, seed=seed * 100_003 + number * job.settings.ranks_per_node + local
            )
            for number, node in enumerate(self.nodes)
            for local in range(job.settings.ranks_per_node)
        ]
        self._arrived: list[float] = []
        self._began_s = 0.0
        self._waits_s = [0.0]
        """Of each step."""
        self.ends_s: list[float] = []

    def run(self) -> ReplayedEpoch:
        """Replay it."""
        for rank in self.ranks:
            rank.start()
        self.time.run(lambda: len(self.ends_s) >= self.job.num_steps)
        end_s = self.ends_s[-1]
        return ReplayedEpoch(
            ends_s=np.array(self.ends_s),
            stall_s=sum(self._waits_s),
            first_s=self._waits_s[0],
            busy_cores=sum(node.busy_s for node in self.nodes) / len(self.nodes) / end_s,
        )

    def transfer(self, size_bytes: float, call: Callable[[], None]) -> None:
        """Bring bytes from the store."""
        if size_bytes <= 0:
            call()
        elif self._pipe is None:
            self.time.after(size_bytes / self._own_bytes_s, call)
        else:
            self._pipe.send(size_bytes, call)

    def got(self) -> None:
        """Note that a rank has its batch; the last one of a step says how long it waited."""
        self._waits_s[-1] = self.time.now_s - self._began_s

    def computed(self) -> None:
        """Note that a rank is through with a step; the last one opens the barrier."""
        self._arrived.append(self.time.now_s)
        if len(self._arrived) < len(self.ranks):
            return
        # Ranks that are not replayed are late for the reason for which these are: batches.
        later_s = self._barrier.later_s(np.array(self._arrived))
        self._waits_s[-1] += later_s
        self._arrived.clear()
        self.time.after(later_s, self._next_step)

    def _next_step(self) -> None:
        self.ends_s.append(self.time.now_s)
        if len(self.ends_s) < self.job.num_steps:
            self._began_s = self.time.now_s
            self._waits_s.append(0.0)
            for rank in self.ranks:
                rank.ask()


class _Barrier:
    """How much later than the ranks that are replayed the others open the barrier.

    Ranks between two barriers are independent draws of one distribution: of how late ranks of the
    last steps were. The latest of so many that are not replayed is drawn from it.
    """

    _STEPS = 40

    def __init__(self, job: _ReplayedJob, rng: np.random.Generator) -> None:
        self._num_others = job.settings.num_ranks - job.num_ranks
        self._late: deque[Floats] = deque(maxlen=self._STEPS)
        self._rng = rng

    def later_s(self, arrived: Floats) -> float:
        """Return how long after the last replayed rank the barrier opens."""
        if self._num_others <= 0:
            return 0.0
        middle = float(np.median(arrived))
        self._late.append(arrived - middle)
        pool = np.concatenate(self._late)
        share = self._rng.random() ** (1 / self._num_others)
        return max(0.0, float(np.quantile(pool, share)) - (float(arrived.max()) - middle))


class _ReplayedRank:
    """A training loop, its workers and their queues."""

    def __init__(self, epoch: _Epoch, node: _NodeCores, *, seed: int) -> None:
        self._epoch, self._node, self._job = epoch, node, epoch.job
        self._time = epoch.time
        self._drawn = DrawnTimes(self._job.making, seed)
        self._rng = np.random.default_rng([seed, 2])
        settings = self._job.settings
        self._queues: list[deque[int]] = [deque() for _ in range(settings.workers)]
        self._busy = [False] * settings.workers
        self._done: set[int] = set()
        self._num_asked = self._num_taken = 0
        self._is_waiting = False
        contends = self._job.shares_cores or not math.isinf(self._job.store_bytes_s)
        pieces = _PIECES if self._job.num_ranks < _MANY_RANKS else _PIECES_MANY
        self._num_pieces = min(pieces, settings.batch_size) if contends else 1
        self._compute_at = int(self._rng.integers(len(self._job.computes_s)))

    def start(self) -> None:
        """Ask workers for the first batches, and the loop for its first."""
        settings = self._job.settings
        for _ in range(settings.workers * settings.prefetch_factor):
            self._assign()
        self.ask()

    def ask(self) -> None:
        """Have the training loop ask for its next batch."""
        if not self._queues:
            self._make(0, self._got)  # The training process makes its batches itself.
            return
        self._is_waiting = True
        self._give()

    def _assign(self) -> None:
        # Workers of an epoch that is replayed in part go on: they know nothing of its cut.
        if self._num_asked >= self._job.settings.steps_per_epoch:
            return
        worker = self._num_asked % len(self._queues)
        self._queues[worker].append(self._num_asked)
        self._num_asked += 1
        self._work(worker)

    def _work(self, worker: int) -> None:
        if self._busy[worker] or not self._queues[worker]:
            return
        self._busy[worker] = True
        number = self._queues[worker].popleft()
        self._make(number, partial(self._made, worker, number))

    def _make(self, number: int, call: Callable[[], None]) -> None:
        job = self._job
        delays, cpus = self._drawn.pieces(job.settings.batch_size, self._num_pieces)
        delays = delays * job.miss_share
        cpus[-1] += job.making.batch_s
        self._piece(0, delays.tolist(), cpus.tolist(), call)

    def _piece(
        self, piece: int, delays: list[float], cpus: list[float], call: Callable[[], None]
    ) -> None:
        """Wait, bring bytes, decode; then the next piece."""
        if piece == len(delays):
            call()
            return
        size_bytes = self._job.batch_bytes / len(delays)
        following = partial(self._piece, piece + 1, delays, cpus, call)
        decode = partial(self._node.work, cpus[piece], following)
        bring = partial(self._epoch.transfer, size_bytes, decode)
        self._time.after(delays[piece], bring)

    def _made(self, worker: int, number: int) -> None:
        self._busy[worker] = False
        self._work(worker)
        self._time.after(self._job.deliver_s, partial(self._delivered, number))

    def _delivered(self, number: int) -> None:
        self._done.add(number)
        self._give()

    def _give(self) -> None:
        if not self._is_waiting or self._num_taken not in self._done:
            return
        self._is_waiting = False
        self._done.remove(self._num_taken)
        self._assign()
        self._got()

    def _got(self) -> None:
        self._epoch.got()
        self._num_taken += 1
        computes = self._job.computes_s
        seconds = float(computes[self._compute_at % len(computes)])
        self._compute_at += 1
        cpu_s = seconds * self._job.cpu_share
        compute = partial(self._node.work, cpu_s, self._epoch.computed)
        hand_over_s = self._job.hand_over_s if self._queues else 0.0
        self._time.after(hand_over_s + seconds - cpu_s, compute)
