"""Runs that are not what a report expects: figures stay right, and nothing is blamed by habit."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.made_runs import MS, MadeRun, made_trace, make_run

from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.compare import compare
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

SLOW_STORE = MadeRun(read_ms=30, is_remote=True, decode_ms=2)


def test_batches_of_another_loader_are_not_those_of_the_loop(tmp_path: Path) -> None:
    run = MadeRun(workers=1, decode_ms=25, steps=60, begin_ms=3000)
    make_run(tmp_path, run)
    alone = analyze(read_trace(tmp_path))
    other = Recorder(tmp_path, role="worker", rank=0)
    for step in range(60):  # The same numbers, of a validation before the training.
        begin = (1 + 30 * step) * MS
        other.span(Kind.BATCH, begin, begin + 20 * MS, step=step, epoch=0, count=8, cpu_ns=20 * MS)
    other.close()
    both = analyze(read_trace(tmp_path))
    assert alone.parts["hand-over"] < 0.02
    assert both.parts["hand-over"] == pytest.approx(alone.parts["hand-over"], abs=0.02)
    assert both.verdict.cause == alone.verdict.cause


def test_the_rate_of_a_store_is_that_of_the_loop(tmp_path: Path) -> None:
    late = replace(SLOW_STORE, begin_ms=20_000.0)
    make_run(tmp_path, late)
    start = Recorder(tmp_path, role="train", rank=0)
    start.span(Kind.INDEX, 1, MS)  # Twenty seconds before the first batch.
    start.close()
    analysis = analyze(read_trace(tmp_path))
    read_bytes = sum(p.read_bytes for p in analysis.patterns)
    assert analysis.read_rate() == pytest.approx(read_bytes / analysis.wall_s, rel=0.05)
    (speed,) = (a for a in analysis.advice if "store_bandwidth" in a.settings)
    assert speed.settings["store_bandwidth"] > analysis.read_rate()


def test_workers_that_are_blocked_without_a_read_are_not_blamed_on_a_disk(tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, MadeRun(decode_ms=2, blocked_ms=30)))
    assert analysis.verdict.cause != "slow-disk"
    assert "does not see" in analysis.verdict.sentence
    assert not any("store" in a.title for a in analysis.advice)


def test_windows_of_one_step_are_analysed(tmp_path: Path) -> None:
    run = MadeRun(decode_ms=2, compute_ms=20, resident_compute_ms=8, window=1, steps=40)
    analysis = analyze(made_trace(tmp_path, run))
    assert analysis.interference.real_s == pytest.approx(0.020, rel=0.02)
    assert analysis.step_s > 0


def test_interference_that_neither_lock_nor_cores_explain_is_blamed_on_neither(
    tmp_path: Path,
) -> None:
    run = MadeRun(decode_ms=2, compute_ms=20, resident_compute_ms=8, window=15, steps=150)
    analysis = analyze(made_trace(tmp_path, run))
    assert analysis.verdict.cause == "loader-interference"
    locked = analyze(made_trace(tmp_path / "lock", replace(run, lock=0.6)))
    assert locked.verdict.cause == "interpreter-lock"


def test_time_between_epochs_is_not_computing(tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, MadeRun(decode_ms=2, steps=20, epochs=4, pause_ms=900)))
    assert analysis.verdict.cause == "between-epochs"


@pytest.mark.parametrize("every", [2, 10])
def test_files_of_one_checkpoint_are_one_checkpoint(every: int, tmp_path: Path) -> None:
    run = MadeRun(decode_ms=2, checkpoint_every=every, checkpoint_ms=80, checkpoint_files=4)
    analysis = analyze(made_trace(tmp_path, run))
    assert len(analysis.checkpoints) == 120 // every
    assert analysis.verdict.cause == "checkpoint-interference"
    seldom = [a.settings["checkpoint_every"] for a in analysis.advice if "half" in a.title]
    assert seldom in ([2 * every], [])


def test_cores_are_shared_by_the_ranks_of_a_node(tmp_path: Path) -> None:
    runs = [replace(SLOW_STORE, facts={"cores": 8, "num_nodes": 2, "ranks_per_node": 1})] * 2
    assert analyze(made_trace(tmp_path, *runs)).cores_per_rank == 8


def test_what_two_ranks_read_counts_once_in_the_size_of_the_data(tmp_path: Path) -> None:
    one = analyze(made_trace(tmp_path / "one", SLOW_STORE))
    two = analyze(made_trace(tmp_path / "two", SLOW_STORE, SLOW_STORE))
    assert two.seen_bytes == one.seen_bytes == sum(p.read_bytes for p in one.patterns)


def test_larger_batches_in_the_same_time_are_faster(tmp_path: Path) -> None:
    small = analyze(made_trace(tmp_path / "small", SLOW_STORE))
    large = analyze(made_trace(tmp_path / "large", replace(SLOW_STORE, batch_size=16)))
    found = compare(small, large, ("small", "large"))
    assert found.is_real
    assert "large is 2.00 times faster than small" in found.sentence
    assert not compare(small, small, ("a", "b")).is_real
