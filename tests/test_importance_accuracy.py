"""Time to accuracy: the model of wall time, the tables, and a small run of the whole benchmark."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.importance_accuracy.__main__ import main  # noqa: E402
from benchmarks.importance_accuracy.summary import interval, time_to  # noqa: E402
from benchmarks.importance_accuracy.training import Late, Stream  # noqa: E402
from benchmarks.importance_accuracy.wall_time import Clock, wall_s  # noqa: E402

from penstock.simulate.importance import DrawnStretch  # noqa: E402

CPU = torch.device("cpu")


class Counting:
    """A source that counts: stretches of five samples, and a list of what it was told."""

    name = "counting"

    def __init__(self) -> None:
        self.num_drawn = 0
        self.observed: list[int] = []

    def draw(self) -> DrawnStretch:
        ids = np.arange(self.num_drawn, self.num_drawn + 5)
        self.num_drawn += 5
        return DrawnStretch(ids=ids, weights=ids.astype(np.float32))

    def observe(self, ids: np.ndarray, losses: np.ndarray) -> None:
        assert np.array_equal(ids, losses)
        self.observed += ids.tolist()


def test_batches_lie_across_stretches_and_lose_nothing() -> None:
    stream = Stream(Counting(), 4, CPU)
    seen = []
    for _ in range(5):
        while stream.is_short:
            stream.draw()
        ids, weights, device_ids, device_weights = stream.batch()
        assert np.array_equal(ids, device_ids.numpy())
        assert np.array_equal(weights, device_weights.numpy())
        assert np.array_equal(ids, weights)
        seen += ids.tolist()
    assert seen == list(range(20))


def test_losses_are_observed_in_the_order_of_steps_and_so_many_steps_late() -> None:
    source = Counting()
    late = Late(source, 3, CPU)
    for step in range(6):
        late.put(np.array([step]), torch.tensor([float(step)]))
        assert source.observed == list(range(step - 2))
    late.flush()
    assert source.observed == list(range(6))


def times(misses: list[int], *, slowness: float, look_ahead: int = 2) -> np.ndarray:
    clock = Clock(compute_s=1.0, look_ahead=look_ahead)
    shares = np.ones(len(misses))
    return wall_s(np.array(misses), shares, clock, batch_size=100, slowness=slowness)


def test_a_fast_store_costs_its_first_read_only() -> None:
    ends = times([80] * 50, slowness=0.5)
    assert ends == pytest.approx(0.5 + np.arange(1, 51))


def test_uniform_epochs_over_a_full_cache_take_slowness_times_their_compute() -> None:
    ends = times([80] * 50, slowness=3.0)
    assert ends[-1] == pytest.approx(3.0 * 50 + 1.0)


def test_reading_ahead_is_bounded() -> None:
    # Ten steps of hits let reading run ahead by two steps, not by ten.
    ends = times([0] * 10 + [100] * 2, slowness=8.0)
    whole = 8.0 * 100 / 80.4
    assert ends[-1] == pytest.approx(9.0 + 2 * whole, rel=0.03)
    assert times([0] * 10 + [100] * 2, slowness=8.0, look_ahead=10)[-1] < ends[-1] - 5


def test_an_accuracy_that_is_never_reached_has_no_time() -> None:
    assert time_to(0.9, np.array([0.5, 0.8]), np.array([1.0, 2.0])) is None


def test_one_seed_has_no_interval() -> None:
    assert interval([0.5]).percent() == "50.00"


def test_a_small_run_trains_and_its_report_gives_the_same_tables_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    main(["--quick", "--seeds", "2", "--jobs", "0", "--device", "cpu", "--json", str(file)])
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == ["uniform", "importance"]
    assert all(row["final"]["mean"] > 0.2 for row in rows), printed  # Chance is 0.1.
    assert 0 < rows[0]["hits"] < rows[1]["hits"]
    main(["--again", str(file)])
    assert printed[printed.index("\ntarget") :] == capsys.readouterr().out
