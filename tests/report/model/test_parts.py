import math
from collections import OrderedDict

import numpy as np
import pytest

from penstock.report.model import bands
from penstock.report.model.lru import lru_hits, node_hits
from penstock.report.model.resources import _least
from penstock.report.model.store_fit import Requests, fit_store
from penstock.simulate.virtual import SharedPipe, VirtualTime


def played_hits(share: float, items: int = 3000, epochs: int = 5) -> float:
    rng, held, hits = np.random.default_rng(3), OrderedDict(), 0
    for epoch in range(epochs):
        for item in rng.permutation(items).tolist():
            if item in held:
                hits += epoch > 0
                held.move_to_end(item)
            elif len(held) >= share * items:
                held.popitem(last=False)
            held[item] = None
    return hits / (items * (epochs - 1))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8, 0.95])
def test_the_formula_has_the_hits_of_a_cache_that_is_played(share: float) -> None:
    assert lru_hits(share) == pytest.approx(played_hits(share), abs=0.01)


def test_on_many_nodes_a_cache_hits_what_it_holds_of_the_set() -> None:
    # With fresh shares every epoch, a node finds what it happens to hold: about the share.
    assert node_hits(0.5, 16) == pytest.approx(0.5, abs=0.06)
    assert node_hits(1.0, 16) == 1.0


def requests(at_once: int, *, latency_s: float, bytes_s: float, seed: int) -> Requests:
    """Return requests of a closed loop: so many at once, each begun when another ends."""
    rng, time, rows = np.random.default_rng(seed), VirtualTime(), []
    pipe = SharedPipe(time, bytes_s)

    def begin() -> None:
        start_s, size = time.now_s, float(rng.integers(50_000, 150_000))

        def done() -> None:
            rows.append((start_s, time.now_s - start_s, size))
            begin()

        wait_s = latency_s * math.exp(0.2 * rng.normal())
        time.after(wait_s, lambda: pipe.send(size, done))

    for _ in range(at_once):
        begin()
    time.run(lambda: len(rows) >= 1000)
    starts, durations, sizes = np.array(rows).T
    return Requests(starts_s=starts, durations_s=durations, sizes=sizes)


def test_a_store_is_found_in_its_requests() -> None:
    few = requests(2, latency_s=0.02, bytes_s=50e6, seed=1)
    many = requests(24, latency_s=0.02, bytes_s=50e6, seed=2)
    store = fit_store([few, many])
    assert store is not None
    assert store.latency_s == pytest.approx(0.02, rel=0.15)
    assert store.bytes_s == pytest.approx(50e6, rel=0.1)


def test_a_bandwidth_that_was_never_reached_is_not_invented() -> None:
    store = fit_store([requests(2, latency_s=0.02, bytes_s=1e9, seed=1)])
    assert store is not None
    assert math.isinf(store.bytes_s)
    assert store.latency_s == pytest.approx(0.02, rel=0.1)
    assert fit_store([]) is None


def test_a_forecast_is_less_sure_of_more_ranks_and_of_a_model_that_does_not_fit() -> None:
    few = bands.doubt("step_s", spread=0.0, misfit=0.0, ranks=4)
    many = bands.doubt("step_s", spread=0.0, misfit=0.0, ranks=512)
    bad = bands.doubt("step_s", spread=0.0, misfit=0.13, ranks=4)
    assert few < many
    assert bad == pytest.approx(math.hypot(few, 0.13))


def test_bytes_are_as_sure_on_many_ranks_as_on_few() -> None:
    few = bands.doubt("store_bytes", spread=0.0, misfit=0.0, ranks=2)
    assert bands.doubt("store_bytes", spread=0.3, misfit=0.5, ranks=512) == few
    assert bands.half_band("store_bytes", "penstock", few) < 0.02


def test_a_model_that_is_far_off_on_its_own_run_still_has_a_band() -> None:
    disturbed = bands.doubt("step_s", spread=0.0, misfit=2000.0, ranks=1)
    assert math.exp(bands.half_band("step_s", "penstock", disturbed)) == pytest.approx(1000)


def test_nine_of_ten_residuals_lie_below_the_quantile() -> None:
    residuals = [(-1) ** n * n / 100 for n in range(1, 30)]
    assert bands.quantile(residuals) == pytest.approx(0.27)


def test_what_no_amount_is_enough_for_has_no_need() -> None:
    assert _least([1.0, 2.0], lambda place: False) is None
    assert _least([1.0, 2.0], lambda place: True) == 1.0
