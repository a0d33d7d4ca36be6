from pathlib import Path

import pytest
from tests.report.model.penstock_rows import penstock_trace

from penstock.plan.bound import epochs_bound
from penstock.report.model import WhatIf, calibrate
from penstock.report.model.penstock_run import BULK_SAMPLES_MAX, expected_max

DATASET = 512 * 100_000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_bytes_from_the_store_are_those_of_the_bound(tmp_path: Path, share: float) -> None:
    model = calibrate(penstock_trace(tmp_path, cache_bytes=0))
    cache = int(share * DATASET)
    forecast = model.outline(WhatIf(memory_cache_bytes=cache))
    bound = epochs_bound(DATASET, cache, 3)
    assert bound * 0.99 <= forecast.store_bytes <= bound * 1.05


def test_the_model_reproduces_a_run_that_never_waits(tmp_path: Path) -> None:
    model = calibrate(penstock_trace(tmp_path, cache_bytes=DATASET))
    assert abs(model.self_check()) < 0.03
    assert model.predict().limit == "compute"


def test_a_slow_store_without_a_cache_is_the_limit(tmp_path: Path) -> None:
    model = calibrate(penstock_trace(tmp_path, cache_bytes=0))
    slow = model.outline(WhatIf(store_bandwidth=20e6))
    assert slow.limit == "store"
    assert slow.step_s == pytest.approx(16 * 100_000 / 20e6, rel=0.1)
    cached = model.outline(WhatIf(store_bandwidth=20e6, memory_cache_bytes=2 * DATASET))
    assert cached.step_s < 0.5 * slow.step_s


def test_many_nodes_share_a_cache_and_read_the_bound_from_the_store(tmp_path: Path) -> None:
    model = calibrate(penstock_trace(tmp_path, cache_bytes=0))
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
