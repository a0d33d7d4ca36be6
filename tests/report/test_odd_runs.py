"""Runs that are not what a report expects: figures stay right, and nothing is blamed by habit."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.made_runs import MS, MadeRun, made_trace, make_run

from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.compare import compare
from penstock.report.pages.text import report_text, verdict_lines, verdict_text
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind
from penstock.units import show_seconds

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


def test_a_run_of_one_step_says_so_and_gets_no_advice(tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, replace(SLOW_STORE, steps=1, epochs=1)))
    assert analysis.advice == ()
    assert "rests on 1 step, and no advice" in verdict_text(analysis)


def test_reads_of_validation_are_not_those_of_training(tmp_path: Path) -> None:
    make_run(tmp_path, replace(SLOW_STORE, is_remote=False, steps=20))
    alone = analyze(read_trace(tmp_path))
    train = Recorder(tmp_path, role="train", rank=0)
    worker = Recorder(tmp_path, role="worker", rank=0)
    begin = 10_000 * MS
    train.span(Kind.VALIDATE, begin, begin + 1000 * MS, count=10, wait_ns=MS)
    for step in range(10):
        at = begin + step * 100 * MS
        worker.span(Kind.OPEN, at, at + MS, object_id=worker.name("other"))
        worker.span(Kind.READ, at, at + MS, object_id=worker.name("other"), size_bytes=500)
        worker.span(Kind.BATCH, at, at + 2 * MS, step=step, epoch=0, count=8)
    train.close()
    worker.close()
    both = analyze(read_trace(tmp_path))
    [validation] = (phase for phase in both.phases if phase.name == "validation")
    assert sum(validation.bytes_by_source.values()) == 5000
    assert (validation.num_requests, validation.num_opens) == (10, 10)
    assert both.patterns[0].requests_per_sample == alone.patterns[0].requests_per_sample
    assert [p.bytes_by_source for p in both.phases if p.name == "first epoch"] == [
        p.bytes_by_source for p in alone.phases if p.name == "first epoch"
    ]


def test_the_kernels_count_is_compared_where_batches_are_made_not_where_modules_are(
    tmp_path: Path,
) -> None:
    train, worker = (Recorder(tmp_path, role=role, rank=0) for role in ("train", "worker"))
    for step in range(40):
        at = step * 10 * MS + 1
        worker.span(Kind.READ, at, at + MS, object_id=worker.name(f"{step}"), size_bytes=1000)
        worker.span(Kind.BATCH, at, at + 2 * MS, step=step, epoch=0, count=8)
        train.span(Kind.NEXT, at, at + 3 * MS, step=step, epoch=0, count=8)
        train.counters(at + 4 * MS, {"io.rchar": 1e6 * step})
        worker.counters(at + 4 * MS, {"io.rchar": 5e6 + 1000.0 * step})
    train.close()
    worker.close()
    trace = read_trace(tmp_path)
    # Both recorded in this process; in a job each is one of its own.
    apart = tuple(replace(p, pid=100 + p.number) for p in trace.processes)
    assert analyze(replace(trace, processes=apart)).completeness.traced_share == 1.0


def test_a_step_is_shown_with_its_mean_which_the_throughput_follows_from(tmp_path: Path) -> None:
    run = MadeRun(decode_ms=2, checkpoint_every=10, checkpoint_ms=400)
    analysis = analyze(made_trace(tmp_path, run))
    shown = f"a step takes {show_seconds(analysis.step_mean_s)} on average"
    assert shown in " ".join(verdict_lines(analysis, 200))
    assert analysis.samples_s == pytest.approx(run.batch_size / analysis.step_mean_s, rel=0.01)


def test_noise_is_not_named_as_what_limits_next(tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, MadeRun(decode_ms=2, hand_over_ms=0.1)))
    assert analysis.verdict.cause == "compute-bound"
    assert analysis.verdict.findings
    assert analysis.verdict.runner_up is None


def test_no_more_workers_are_advised_than_cores_feed(tmp_path: Path) -> None:
    run = MadeRun(open_ms=20, read_ms=20, decode_ms=40, compute_ms=1, facts={"cores": 2})
    counts = [
        advice.settings["num_workers"]
        for advice in analyze(made_trace(tmp_path, run)).advice
        if "num_workers" in advice.settings
    ]
    assert max(counts, default=0) <= 4  # Half of a worker's time is on a core.


def test_the_text_has_what_the_charts_show(tmp_path: Path) -> None:
    runs = [MadeRun(read_ms=20, is_remote=True, decode_ms=2), MadeRun(read_ms=30, is_remote=True)]
    said = report_text(analyze(made_trace(tmp_path, *runs)))
    for title in ("Sources", "Sizes and times", "Ranks", "Scaling", "request size"):
        assert f"\n{title}" in said or f"\n  {title}" in said, title


def test_runs_of_different_data_sets_are_compared_with_a_word_about_it(tmp_path: Path) -> None:
    small = analyze(made_trace(tmp_path / "small", replace(SLOW_STORE, facts={"num_samples": 80})))
    large = analyze(made_trace(tmp_path / "large", replace(SLOW_STORE, facts={"num_samples": 90})))
    assert "Their data sets have 80 and 90 samples." in compare(small, large, ("a", "b")).sentence
    assert "data sets" not in compare(small, small, ("a", "b")).sentence


def test_a_setting_that_one_run_states_and_the_other_shows_is_compared(tmp_path: Path) -> None:
    stated = analyze(made_trace(tmp_path / "a", replace(SLOW_STORE, facts={"num_files": 3})))
    shown = analyze(made_trace(tmp_path / "b", SLOW_STORE))
    settings = {name: pair for name, *pair in compare(stated, shown, ("a", "b")).settings}
    assert settings["files"] == ["3", "16"]
