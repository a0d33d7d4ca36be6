import itertools
from pathlib import Path

import pytest
from tests.report.model.torch_rows import draw, taken_s, torch_trace

from penstock.errors import OptionError
from penstock.report.model import WhatIf, calibrate
from penstock.report.model.observed import step_s_of
from penstock.report.model.scaling import scaling_curve
from penstock.trace import Kind, Recorder, read_trace


def exact_step_s(*, workers: int, prefetch: int, compute_s: float = 0.01) -> float:
    services, computes = draw(2, 2000, 0.08, compute_s)
    taken = taken_s(services, computes, workers=workers, prefetch=prefetch)[2]
    return step_s_of(taken + computes)


def test_the_model_reproduces_the_run_it_was_calibrated_from(tmp_path: Path) -> None:
    model = calibrate(torch_trace(tmp_path))
    assert model.fits
    assert abs(model.self_check()) < 0.01 + 2 * model.own_chance.step
    forecast = model.predict()
    assert forecast.step_s_low < model.measured.step_s < forecast.step_s_high
    assert forecast.limit == "latency"


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (4, 1), (4, 4), (12, 2)])
def test_other_settings_come_out_as_the_exact_recurrence_says(
    tmp_path: Path, workers: int, prefetch: int
) -> None:
    model = calibrate(torch_trace(tmp_path))
    said = model.outline(WhatIf(workers=workers, prefetch_factor=prefetch)).step_s
    assert said == pytest.approx(exact_step_s(workers=workers, prefetch=prefetch), rel=0.05)


def test_a_compute_bound_run_is_limited_by_compute(tmp_path: Path) -> None:
    model = calibrate(torch_trace(tmp_path, workers=16, compute_s=0.03))
    forecast = model.predict()
    assert forecast.limit == "compute"
    assert forecast.stall_share < 0.03
    twice = model.outline(WhatIf(compute_factor=2.0))
    assert twice.step_s == pytest.approx(2 * forecast.step_s, rel=0.03)


def test_more_bandwidth_is_never_slower(tmp_path: Path) -> None:
    model = calibrate(torch_trace(tmp_path, workers=8))
    steps = [
        model.outline(WhatIf(store_bandwidth=rate, num_samples=100_000)).step_s
        for rate in (5e6, 10e6, 20e6, 1e9)
    ]
    assert all(after <= before * 1.02 for before, after in itertools.pairwise(steps))
    # 400 kB a step: at 5 MB/s no loader is faster than 80 ms. Batches of 8 workers come in bunches:
    # of the 200 steps that are looked at, some belong to the bunch before.
    assert 0.08 * 0.96 <= steps[0] <= 0.08 * 1.05


def test_at_1024_ranks_a_shared_store_is_the_limit_and_its_bytes_the_bound(tmp_path: Path) -> None:
    model = calibrate(torch_trace(tmp_path, workers=8))
    base = WhatIf(ranks_per_node=8, store_bandwidth=2e9, num_samples=2_000_000)
    curve = scaling_curve(model, [1, 128], base)
    first, last = curve.forecasts.values()
    assert last.num_ranks == 1024
    bound_s = 1024 * 8 * 50_000 / 2e9
    assert bound_s * 0.97 <= last.step_s <= bound_s * 1.15
    assert last.limit == "store"
    assert curve.takeovers[-1].after == "store"
    # Half of the bandwidth is gone at 2e9 / (8 * 50_000 / 0.0125 s) ranks, about 60.
    assert 2 <= curve.takeovers[-1].nodes <= 40
    assert last.step_s_high / last.step_s > first.step_s_high / first.step_s


def test_what_has_too_few_steps_or_no_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has 4 steps"):
        calibrate(torch_trace(tmp_path / "short", num_steps=4))
    recorder = Recorder(tmp_path / "bare", role="train", rank=0)
    recorder.facts({"loader": "torch"})
    for step in range(20):
        recorder.span(Kind.NEXT, step * 1000, step * 1000 + 500, step=step, epoch=0, count=8)
    recorder.close()
    with pytest.raises(OptionError, match="no BATCH"):
        calibrate(read_trace(tmp_path / "bare"))


def test_nonsense_is_refused() -> None:
    with pytest.raises(OptionError, match="nodes must be at least 1, got 0"):
        WhatIf(nodes=0)
    assert WhatIf(workers=0).changes == {"workers": 0}


def test_a_forecast_of_an_epoch_of_few_steps_says_so(tmp_path: Path) -> None:
    model = calibrate(torch_trace(tmp_path))
    said = "an epoch, in which loaders hardly begin"
    assert not any(said in note for note in model.outline().notes)
    assert any(said in note for note in model.outline(WhatIf(nodes=64)).notes)
