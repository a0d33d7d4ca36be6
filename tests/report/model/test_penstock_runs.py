from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.model.penstock_rows import penstock_trace

from penstock.flow.bound import epochs_bound
from penstock.report.model import RunModel, WhatIf, calibrate
from penstock.report.model.penstock_run import BULK_SAMPLES_MAX, expected_max

DATASET = 512 * 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RunModel:
    return calibrate(penstock_trace(tmp_path_factory.mktemp("run"), cache_bytes=0))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_bytes_from_the_store_are_those_of_the_bound(model: RunModel, share: float) -> None:
    cache = int(share * DATASET)
    forecast = model.outline(WhatIf(memory_cache_bytes=cache))
    bound = epochs_bound(DATASET, cache, 3)
    assert bound * 0.99 <= forecast.store_bytes <= bound * 1.05


def test_the_model_reproduces_a_run_that_never_waits(tmp_path: Path) -> None:
    model = calibrate(penstock_trace(tmp_path, cache_bytes=DATASET))
    assert abs(model.self_check()) < 0.03
    assert model.predict().limit == "compute"


def test_a_slow_store_without_a_cache_is_the_limit(model: RunModel) -> None:
    slow = model.outline(WhatIf(store_bandwidth=20e6))
    assert slow.limit == "store"
    assert slow.step_s == pytest.approx(16 * 100_000 / 20e6, rel=0.1)
    cached = model.outline(WhatIf(store_bandwidth=20e6, memory_cache_bytes=2 * DATASET))
    assert cached.step_s < 0.5 * slow.step_s


def test_the_last_batch_of_an_epoch_is_filled_up_from_the_store(model: RunModel) -> None:
    even, uneven = (model.outline(WhatIf(batch_size=size)).store_bytes for size in (16, 24))
    # 22 batches of 24 are 528 samples, 16 more than there are, in each of three epochs.
    assert uneven - even == pytest.approx(3 * 16 * 100_000, rel=0.1)


def test_a_slow_link_makes_steps_of_few_nodes_longer(model: RunModel) -> None:
    question = WhatIf(nodes=2, memory_cache_bytes=DATASET // 2, link_bandwidth=1e9)
    fast = model.outline(question)
    slow = model.outline(replace(question, link_bandwidth=10e6))
    # Half of a node's 1.6 MB a step come from the other one.
    assert slow.step_s == pytest.approx(0.08, rel=0.2)
    assert fast.step_s < 0.03
    assert fast.store_bytes == slow.store_bytes
    assert fast.peer_bytes == pytest.approx(1.5 * DATASET, rel=0.1)


def test_a_forecast_has_a_band_around_each_quantity(model: RunModel) -> None:
    forecast = model.predict(WhatIf(nodes=2, memory_cache_bytes=DATASET // 4))
    assert forecast.step_s_low < forecast.step_s < forecast.step_s_high
    assert forecast.first_epoch_s_low < forecast.epoch_s[0] < forecast.first_epoch_s_high
    assert forecast.stall_share_low <= forecast.stall_share <= forecast.stall_share_high
    assert forecast.store_bytes_low < forecast.store_bytes < forecast.store_bytes_high
    assert forecast.peer_bytes_low < forecast.peer_bytes < forecast.peer_bytes_high


def test_many_nodes_share_a_cache_and_read_the_bound_from_the_store(model: RunModel) -> None:
    nodes = 16
    question = WhatIf(
        nodes=nodes, ranks_per_node=4, num_samples=20_000, memory_cache_bytes=10**8, epochs=3
    )
    forecast = model.outline(question)
    dataset = 20_000 * 100_000
    assert BULK_SAMPLES_MAX > 20_000
    bound = epochs_bound(dataset, nodes * 10**8, 3)
    assert bound * 0.99 <= forecast.store_bytes <= bound * 1.05
    assert forecast.peer_bytes > 0
    assert any("links between nodes" in note for note in forecast.notes)


def test_the_largest_of_more_draws_is_larger() -> None:
    import numpy as np

    draws = np.random.default_rng(0).normal(1.0, 0.1, 1000)
    means = [expected_max(draws, count) for count in (1, 2, 8, 64)]
    assert means == sorted(means)
    assert means[0] == pytest.approx(draws.mean())
