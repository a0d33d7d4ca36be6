"""Predictions: how long a real run will take, and how it behaves when the store does not.

One node, its ranks and the store are simulated event by event: the real flow decides, and devices
in virtual time carry it out. A prediction needs a machine (as `penstock probe` measures it), the
samples, the order, and how long a step computes.

>>> from penstock.machine import Curve, LinkModel, Machine, StoreModel
>>> store = StoreModel(latency_s=0.02, latency_p99_s=0.04, throughput=Curve.flat(100e6))
>>> machine = Machine(store=store, link=LinkModel(bytes_s=1e9), cores=2)
>>> run = LoaderRun(samples=Samples.alone(np.full(640, 100_000)), batch_size=64, compute_s=0.1)
>>> predicted = predict(machine, run)
>>> 0.9 < predicted.epoch_s[0] < 1.4
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.flow import FlowBudget, SourcePrior
from penstock.flow.planning import requests_max
from penstock.machine import Machine
from penstock.order import GlobalOrder, Order, Steps
from penstock.simulate.job import Floats
from penstock.simulate.virtual import VirtualTime
from penstock.simulate.virtual_node import Costs, Samples, VirtualNode
from penstock.simulate.virtual_rank import VirtualRank
from penstock.simulate.weather import Weather


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """A data set, a loader's options and a training loop."""

    samples: Samples
    batch_size: int
    """Per rank."""
    compute_s: float
    """The training loop's own time per step."""
    epochs: int = 1
    ranks: int = 1
    order: Order | None = None
    """None: a fresh shuffle of all samples in each epoch, seed 0."""
    stage_bytes: int = 512_000_000
    """Memory for samples on their way, per rank."""
    threads: int = 2
    """Threads that copy samples into batches, per rank."""
    requests_max: int | None = None
    """The most requests in flight of a rank; None: as a loader decides."""
    costs: Costs = field(default_factory=Costs)
    knows_machine: bool = True
    """Whether the loader finds the machine's file. Then it begins with as many requests as fill the
    store's link; else it has to find out how many those are."""
    is_warm: bool = False
    """Whether the tiers are full from the start."""

    def __post_init__(self) -> None:
        counts = (self.batch_size, self.epochs, self.ranks, self.stage_bytes, self.threads)
        if min(counts) < 1 or self.compute_s < 0:
            raise OptionError(
                "batch_size, epochs, ranks, stage_bytes and threads are at least 1 and compute_s "
                f"at least 0, got {counts} and {self.compute_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The times and counts of a predicted run."""

    epoch_s: tuple[float, ...]
    """From the end of the epoch before, or the start, to the end of its last step."""
    first_batch_s: float
    stall_s: float
    """How long ranks waited for batches, on average."""
    store_bytes: float
    num_requests: int
    num_refused: int
    num_hedges: int
    taken_s: Floats
    """When rank 0 took each batch."""
    waits_s: Floats
    """How long each step waited for batches: until the last rank had its own."""
    arrivals: tuple[tuple[float, float], ...]
    """Times and bytes of the reads from the store, in the order of arrival."""

    @property
    def time_s(self) -> float:
        """The time of all epochs together."""
        return sum(self.epoch_s)

    def bytes_s(self, start_s: float, stop_s: float) -> float:
        """Return the rate of the store between two times."""
        size_bytes = sum(size for at_s, size in self.arrivals if start_s <= at_s < stop_s)
        return size_bytes / (stop_s - start_s)


def predict(machine: Machine, run: LoaderRun, weather: Weather | None = None) -> Prediction:
    """Predict a run on a machine; its tiers have the capacities that the machine states."""
    time = VirtualTime()
    node = VirtualNode(time, machine, run.samples, weather or Weather())
    if run.is_warm:
        node.warm_up()
    order = run.order or GlobalOrder(num_samples=len(run.samples.lengths), seed=0)
    training = _Training(time, run, _steps(run, order))
    num_requests = run.requests_max or requests_max(run.ranks)
    budget = FlowBudget(stage_bytes_max=run.stage_bytes, requests_max=num_requests)
    for number in range(run.ranks):
        rank = VirtualRank(
            node,
            _batches(run, order, number, run.epochs),
            costs=run.costs,
            budget=budget,
            threads=run.threads,
            prior=_prior(machine, run),
            # Fills look one epoch ahead: after it, every sample has come once.
            ahead=partial(_batches, run, order, number, 1),
        )
        training.add(rank)
        rank.start()
    time.run(lambda: training.is_over)
    # A run that stalls would end here without a word: a lost callback is a bug of the model.
    assert training.is_over, "no events are left, and the run is not over"
    return training.prediction(node)


def _prior(machine: Machine, run: LoaderRun) -> SourcePrior | None:
    sample_bytes = float(run.samples.lengths.mean()) if len(run.samples.lengths) else 1.0
    if not run.knows_machine:
        return None
    return SourcePrior.of_store(machine.store, sample_bytes, num_ranks=run.ranks)


def _steps(run: LoaderRun, order: Order) -> Steps:
    return Steps(
        num_samples=order.num_samples,
        global_batch_size=run.batch_size * run.ranks,
        num_ranks=run.ranks,
    )


def _batches(run: LoaderRun, order: Order, rank: int, epochs: int) -> Iterator[Ints]:
    """Yield the samples of a rank's batches."""
    steps = _steps(run, order)
    for epoch in range(epochs):
        ids = order.ids(epoch, 0, order.num_samples)
        for step in range(steps.num_steps):
            positions, is_real = steps.positions(step, rank)
            yield ids[positions[is_real]]


class _Training:
    """The training loops of all ranks: each takes a batch and computes; all wait for the last."""

    def __init__(self, time: VirtualTime, run: LoaderRun, steps: Steps) -> None:
        self._time, self._run = time, run
        self._steps_per_epoch = steps.num_steps
        self._ranks: list[VirtualRank] = []
        self._num_computing = 0
        self._num_steps = 0
        self._taken: list[float] = []
        self._ends: list[float] = [0.0]
        self._asked_s = 0.0
        self._stall_s = 0.0
        self._waits_s = [0.0] * (steps.num_steps * run.epochs)
        self.is_over = False

    def add(self, rank: VirtualRank) -> None:
        """Start a rank's training loop; it asks for its first batch at once."""
        self._ranks.append(rank)
        number = len(self._ranks) - 1
        self._time.at(0.0, partial(rank.take, partial(self._got, number)))

    def _got(self, number: int) -> None:
        now_s = self._time.now_s
        self._stall_s += (now_s - self._asked_s) / self._run.ranks
        self._waits_s[self._num_steps] = now_s - self._asked_s  # A step waits for its last rank.
        if number == 0:
            self._taken.append(now_s)
        self._time.after(self._run.compute_s, self._computed)

    def _computed(self) -> None:
        self._num_computing += 1
        if self._num_computing < self._run.ranks:
            return
        self._num_computing = 0
        self._num_steps += 1
        self._asked_s = self._time.now_s
        if self._num_steps % self._steps_per_epoch == 0:
            self._ends.append(self._time.now_s)
        if self._num_steps == self._steps_per_epoch * self._run.epochs:
            self.is_over = True
            return
        for number, rank in enumerate(self._ranks):
            rank.take(partial(self._got, number))

    def prediction(self, node: VirtualNode) -> Prediction:
        """Return the prediction of a run that is over."""
        return Prediction(
            epoch_s=tuple(np.diff(self._ends).tolist()),
            first_batch_s=self._taken[0],
            stall_s=self._stall_s,
            store_bytes=node.store.read_bytes,
            num_requests=node.store.num_requests,
            num_refused=node.store.num_refused,
            num_hedges=sum(rank.flow.num_hedges for rank in self._ranks),
            taken_s=np.array(self._taken),
            waits_s=np.array(self._waits_s),
            arrivals=tuple(node.store.arrivals),
        )
