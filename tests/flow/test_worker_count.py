"""The number of workers: bounds for any observations, and where a closed loop settles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.flow.worker_count import WorkerCount, WorkerLimits, WorkInterval

shares = st.floats(0, 1)


@st.composite
def limits(draw: st.DrawFn) -> WorkerLimits:
    least, start, most = sorted(draw(st.tuples(*[st.integers(1, 64)] * 3)))
    return WorkerLimits(least=least, start=start, most=most)


def interval(num_workers: int, **changes: float) -> WorkInterval:
    facts = {"seconds": 1.0, "wait_share": 0.0, "busy_share": 1.0, "idle_cores": 0.0}
    return WorkInterval(num_workers=num_workers, **{"num_batches": 16.0, **facts, **changes})


@dataclass
class Job:
    """A toy training job, in the steady state of each second.

    A step needs `step_s` of the loop's core and `work_s` of a worker. Workers have low priority:
    they use what the loop leaves of the cores.
    """

    work_s: float
    step_s: float
    num_cores: int = 16
    fetched_batches_s: float = 1e9
    useful: Callable[[float], float] = lambda number: number
    """How many workers' work so many workers do."""
    noise: float = 0.0
    start_intervals: int = 0
    """How long new workers take until they are ready."""

    def batches_s(self, number: int) -> float:
        made = self.useful(number) / self.work_s
        cores = self.num_cores / (self.work_s + self.step_s)
        return min(1 / self.step_s, made, cores, self.fetched_batches_s)

    def best(self, most: int) -> int:
        top = self.batches_s(most)
        return next(n for n in range(1, most + 1) if self.batches_s(n) > 0.999 * top)

    def seen(self, number: int, random: Random) -> WorkInterval:
        rate = self.batches_s(number) * (1 + self.noise * random.uniform(-1, 1))
        slow = number / self.useful(number)  # Workers that hold each other up look busy.
        return interval(
            number,
            wait_share=max(0.0, 1 - rate * self.step_s),
            busy_share=min(1.0, rate * self.work_s * slow / number),
            idle_cores=max(0.0, self.num_cores - rate * (self.step_s + self.work_s * slow)),
            num_batches=rate,
        )

    def run(self, count: WorkerCount, num_intervals: int = 400, seed: int = 0) -> list[int]:
        """Return the number of workers in each interval."""
        random, number, until, numbers = Random(seed), count.target, 0, []
        for at in range(num_intervals):
            target = count.on(self.seen(number, random))
            until = at + self.start_intervals if target == number else until
            if target != number and at >= until:
                number = target
            numbers.append(number)
        return numbers


@given(limits(), st.lists(st.tuples(shares, shares, st.floats(0, 64), st.floats(0, 1e6))))
def test_no_observation_leads_outside_the_limits(
    bounds: WorkerLimits, facts: list[tuple[float, float, float, float]]
) -> None:
    count = WorkerCount(bounds)
    for wait, busy, idle, done in facts:
        for _ in range(5):
            seen = interval(
                count.target, wait_share=wait, busy_share=busy, idle_cores=idle, num_batches=done
            )
            assert bounds.least <= count.on(seen) <= bounds.most


@given(limits(), shares, st.floats(0, 64), st.floats(0, 1e6))
def test_it_is_never_raised_while_the_loop_does_not_wait(
    bounds: WorkerLimits, busy: float, idle: float, done: float
) -> None:
    count = WorkerCount(bounds)
    for _ in range(50):
        before = count.target
        seen = interval(before, busy_share=busy, idle_cores=idle, num_batches=done)
        assert count.on(seen) <= before


@given(limits(), shares, st.floats(0.8, 1), st.floats(0, 1e6))
def test_it_is_never_raised_while_no_core_is_idle(
    bounds: WorkerLimits, wait: float, busy: float, done: float
) -> None:
    count = WorkerCount(bounds)
    for _ in range(50):
        seen = interval(count.target, wait_share=wait, busy_share=busy, num_batches=done)
        assert count.on(seen) <= bounds.start


@given(limits(), shares, st.floats(0, 0.75), st.floats(0, 64), st.floats(0, 1e6))
def test_it_is_never_raised_while_workers_wait_for_fetches(
    bounds: WorkerLimits, wait: float, busy: float, idle: float, done: float
) -> None:
    count = WorkerCount(bounds)
    for _ in range(50):
        seen = interval(
            count.target, wait_share=wait, busy_share=busy, idle_cores=idle, num_batches=done
        )
        assert count.on(seen) <= bounds.start


@settings(max_examples=60)
@given(
    work_s=st.floats(0.01, 4.0),
    step_s=st.floats(0.01, 0.5),
    num_cores=st.integers(1, 64),
    start=st.integers(1, 64),
    noise=st.sampled_from([0.0, 0.01]),
)
def test_it_settles_within_one_of_the_best_number_and_stays(
    work_s: float, step_s: float, num_cores: int, start: int, noise: float
) -> None:
    job = Job(work_s, step_s, num_cores, noise=noise)
    count = WorkerCount(WorkerLimits(most=num_cores, start=min(start, num_cores)))
    numbers = job.run(count)
    best = job.best(num_cores)
    settled = numbers[250:]
    assert max(settled) - min(settled) <= 1
    assert best - 1 <= min(settled), (best, settled[-1])
    assert max(settled) <= best + 1, (best, settled[-1])


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_take_seconds_to_start_are_waited_for(seed: int) -> None:
    job = Job(work_s=0.6, step_s=0.1, noise=0.02, start_intervals=8)
    numbers = job.run(WorkerCount(WorkerLimits(most=16, start=2)), seed=seed)
    assert set(numbers[-150:]) <= {6, 7}


@pytest.mark.parametrize("useful_max", [3, 5, 9, 13])
@pytest.mark.parametrize("start", [1, 4, 14])
def test_workers_that_only_hold_each_other_up_are_taken_back(useful_max: int, start: int) -> None:
    # Memory bandwidth, or a lock in the transform: cores are idle and the workers look busy.
    job = Job(work_s=4.0, step_s=0.1, num_cores=64, useful=lambda n: min(n, useful_max))
    numbers = job.run(WorkerCount(WorkerLimits(most=16, start=start)), num_intervals=1500)
    settled = numbers[-500:]
    # A start beyond what is useful is kept: workers too many cost memory and no time.
    # It is tried now and then whether one more brings something by now.
    best = max(start, useful_max)
    assert set(settled) <= {best, best + 1}
    assert settled.count(max(settled, key=settled.count)) > 0.9 * len(settled)


def test_second_hardware_threads_are_used_while_the_loop_waits() -> None:
    job = Job(work_s=4.0, step_s=0.1, useful=lambda n: min(n, 8) + 0.35 * max(0, n - 8))
    job.num_cores = 64  # Each of them counts as an idle core.
    numbers = job.run(WorkerCount(WorkerLimits(most=16, start=4)))
    assert set(numbers[-150:]) == {16}


def test_a_slow_store_lowers_it_and_the_work_lost_is_none() -> None:
    job = Job(work_s=1.0, step_s=0.1, fetched_batches_s=4.0)
    numbers = job.run(WorkerCount(WorkerLimits.of_cores(16)))
    assert set(numbers[-150:]) == {5}
    assert job.batches_s(5) == job.batches_s(14)


def test_a_job_that_changes_is_followed() -> None:
    count, job = WorkerCount(WorkerLimits.of_cores(16)), Job(work_s=0.3, step_s=0.1)
    assert set(job.run(count)[-100:]) <= {3, 4}
    job.work_s = 1.0
    assert set(job.run(count)[-100:]) <= {9, 10, 11}
    job.work_s = 0.3
    assert set(job.run(count)[-100:]) <= {3, 4}


def test_a_pause_of_the_loop_changes_nothing() -> None:
    count = WorkerCount(WorkerLimits(most=16, start=14))
    for _ in range(500):
        assert count.on(interval(14, busy_share=0.0, idle_cores=15.0, num_batches=0.0)) == 14


def test_workers_that_never_start_do_not_stop_the_measuring() -> None:
    count, job = WorkerCount(WorkerLimits(most=16, start=12)), Job(work_s=0.3, step_s=0.1)
    random = Random(0)
    targets = [count.on(job.seen(9, random)) for _ in range(200)]
    assert targets[0] == 12
    assert targets[-1] <= 9


def test_all_cores_are_used_from_the_start() -> None:
    for num_cores in range(2, 65):
        assert WorkerLimits.of_cores(num_cores).start == num_cores
    assert WorkerLimits.of_cores(0) == WorkerLimits(most=1, start=1)


@pytest.mark.parametrize("wrong", [{"least": 0}, {"least": 5}, {"start": 9}, {"most": 3}])
def test_limits_out_of_order_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="least <= start <= most"):
        WorkerLimits(**{"least": 1, "start": 4, "most": 8, **wrong})


def test_the_best_number_of_the_toy_is_what_its_times_say() -> None:
    assert Job(work_s=0.6, step_s=0.1).best(16) == 6
    assert Job(work_s=1.0, step_s=0.3).best(16) == ceil(1.0 / 0.3)
