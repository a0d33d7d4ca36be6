"""Predictions: the real flow on devices that only count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import OptionError
from penstock.machine import Curve, LinkModel, Machine, StoreModel, TierModel
from penstock.simulate import (
    Costs,
    LoaderRun,
    Prediction,
    Refusals,
    Samples,
    Slow,
    Stalls,
    Weather,
    predict,
)

SIZE = 110_000
COUNT = 2000
BATCH = 50
LINK = 100e6
SET_S = COUNT * SIZE / LINK


def machine(share: float = 0.0, kind: str = "memory", **store: float) -> Machine:
    given = {"latency_s": 0.02, "latency_p99_s": 0.05, **store}
    fast = Curve.flat(5e9)
    disk = Curve.flat(200e6)
    tier = TierModel(
        kind="disk" if kind == "disk" else "memory",
        capacity_bytes=int(share * COUNT * SIZE),
        read=disk if kind == "disk" else fast,
        write=fast,
    )
    return Machine(
        store=StoreModel(throughput=Curve.flat(LINK), **given),  # type: ignore[arg-type]
        link=LinkModel(bytes_s=1e9),
        tiers=(tier,) if share else (),
        cores=2,
    )


def task(**changes: object) -> LoaderRun:
    plain = LoaderRun(
        samples=Samples.alone(np.full(COUNT, SIZE)),
        batch_size=BATCH,
        compute_s=0.0,
        epochs=3,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_without_computing_an_epoch_takes_what_the_link_takes(share: float) -> None:
    found = predict(machine(share), task())
    assert found.epoch_s[0] == pytest.approx(SET_S, rel=0.15)
    later = (1 - share) * SET_S
    assert found.epoch_s[2] == pytest.approx(later, rel=0.05, abs=0.1)
    least = (1 + 2 * (1 - share)) * COUNT * SIZE
    # A few requests in a hundred are asked for twice.
    assert least <= found.store_bytes <= 1.02 * least


def test_computing_hides_a_store_that_is_faster() -> None:
    found = predict(machine(), task(compute_s=0.11))
    assert sum(found.epoch_s[1:]) == pytest.approx(2 * 40 * 0.11, rel=0.005)
    assert found.stall_s < 0.5


def test_what_is_in_the_tiers_at_the_start_is_not_read() -> None:
    found = predict(machine(1.0), task(is_warm=True, epochs=1))
    assert found.store_bytes == 0
    assert found.epoch_s[0] < 0.2


def test_a_disk_takes_its_time() -> None:
    found = predict(machine(1.0, "disk"), task(is_warm=True, epochs=1))
    assert found.epoch_s[0] == pytest.approx(COUNT * SIZE / 200e6, rel=0.1)


def test_requests_cost_python_its_time() -> None:
    found = predict(machine(), task(epochs=1, costs=Costs(request_s=0.005)))
    assert found.epoch_s[0] == pytest.approx(COUNT * 0.005, rel=0.05)


def test_bytes_cost_cores_their_time() -> None:
    found = predict(machine(), task(epochs=1, costs=Costs(byte_s=40e-9)))
    assert found.epoch_s[0] == pytest.approx(COUNT * SIZE * 40e-9 / 2, rel=0.1)


def test_ranks_of_a_node_fetch_each_byte_once_between_them() -> None:
    found = predict(machine(1.0), task(ranks=2, batch_size=25))
    assert COUNT * SIZE <= found.store_bytes <= 1.02 * COUNT * SIZE
    assert found.epoch_s[0] == pytest.approx(SET_S, rel=0.15)


def test_small_samples_share_units(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 256), np.float32))
    samples = Samples.of(penstock.open(str(tmp_path)))
    assert samples.lengths.tolist() == [1024] * 5000
    assert len(samples.unit_lengths) < 60
    run = task(samples=samples, batch_size=100, epochs=2)
    found = predict(machine(1.0), run)
    assert found.num_requests < 120
    assert found.store_bytes == pytest.approx(5000 * 1024, rel=0.1)


def test_the_same_seed_predicts_the_same() -> None:
    once = task(epochs=1)
    first, again = (predict(machine(0.3), once) for _ in range(2))
    assert first == replace(again, taken_s=first.taken_s, waits_s=first.waits_s)
    assert np.array_equal(first.waits_s, again.waits_s)
    assert np.array_equal(first.taken_s, again.taken_s)
    assert predict(machine(0.3), once, Weather(seed=1)).epoch_s != first.epoch_s


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError, match="at least 1"):
        task(batch_size=0)


# -- adaptation ----------------------------------------------------------------------------------

LONG = LoaderRun(samples=Samples.alone(np.full(16_000, SIZE)), batch_size=64, compute_s=0.065)


def run_in(weather: Weather, **store: float) -> Prediction:
    return predict(machine(**store), LONG, weather)


def test_after_a_ten_fold_slow_down_the_rate_is_back_within_two_seconds() -> None:
    found = run_in(Weather(slow=(Slow(factor=10, start_s=5, stop_s=9),)))
    assert found.bytes_s(3, 5) > 0.95 * LINK
    assert 0.07 * LINK < found.bytes_s(6, 9) < 0.12 * LINK
    assert found.bytes_s(11, 12) > 0.9 * LINK


def test_after_a_burst_of_stalls_the_rate_is_back_within_two_seconds() -> None:
    found = run_in(Weather(stalls=(Stalls(share=0.02, stall_s=2.0, start_s=5, stop_s=8),)))
    assert found.bytes_s(10, 11) > 0.9 * LINK
    assert found.num_hedges > 20


def test_a_store_that_refuses_is_asked_less_and_used_again_later() -> None:
    found = run_in(Weather(refusals=(Refusals(share=0.5, start_s=5, stop_s=7),)))
    assert found.num_refused > 0
    assert found.bytes_s(14, 16) > 0.9 * LINK


def test_a_limit_of_requests_is_met_but_not_missed_by_much() -> None:
    found = run_in(Weather(), requests_s_max=500.0)
    allowed = 500 * SIZE
    assert 0.75 * allowed < found.bytes_s(5, 20) <= 1.01 * allowed


@pytest.mark.parametrize("latency_s", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("sample_bytes", [10_000, 100_000])
def test_a_known_machine_halves_the_wait_for_the_first_batch(
    latency_s: float, sample_bytes: int
) -> None:
    curve = Curve(counts=(1, 20), bytes_s=(50e6, 1000e6))
    store = StoreModel(latency_s=latency_s, latency_p99_s=2 * latency_s, throughput=curve)
    measured = Machine(store=store, link=LinkModel(bytes_s=1e9), cores=8)
    run = LoaderRun(
        samples=Samples.alone(np.full(128 * 20, sample_bytes)),
        batch_size=128,
        compute_s=0.05,
        costs=Costs(start_s=0.0),
    )
    known = predict(measured, run)
    guessed = predict(measured, replace(run, knows_machine=False))
    assert known.first_batch_s < 0.5 * guessed.first_batch_s
    assert known.time_s < guessed.time_s
