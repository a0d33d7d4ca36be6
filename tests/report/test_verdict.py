"""Runs with known causes: the shares add up, and the verdict names what was planted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.made_runs import MS, MadeRun, made_trace

from penstock.errors import OptionError
from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.epoch_starts import epoch_start_wait
from penstock.report.analysis.pipeline import pipeline_of
from penstock.report.analysis.values import CATEGORIES
from penstock.report.pages.text import report_text, verdict_text
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

IDLE = {"cpu.user_s": (0.0, 0.5), "cpu.delay_s": (0.0, 0.0)}
"""Half a second of processor time in a run of seconds: cores are free."""
BUSY = {"cpu.user_s": (0.0, 40.0), "cpu.delay_s": (0.0, 0.0)}

CAUSES = {
    "slow-store": MadeRun(read_ms=30, is_remote=True, decode_ms=2),
    "slow-disk": MadeRun(read_ms=30, decode_ms=2),
    "cold-page-cache": MadeRun(read_ms=2, cold_factor=25, decode_ms=2),
    "tiny-files": MadeRun(read_ms=5, open_ms=30, decode_ms=2),
    "too-few-workers": MadeRun(workers=1, decode_ms=25, counters=IDLE),
    "heavy-decode": MadeRun(workers=8, decode_ms=160, counters=BUSY, facts={"cores": 8}),
    "skewed-shards": MadeRun(read_ms=6, slow_object=25, steps=120),
    "slow-hand-over": MadeRun(hand_over_ms=8, decode_ms=2),
    "checkpoint-interference": MadeRun(decode_ms=2, checkpoint_every=10, checkpoint_ms=80),
    "interpreter-lock": MadeRun(decode_ms=2, lock=0.5),
    "oversubscribed-cores": MadeRun(
        decode_ms=2, no_core=0.5, counters={"cpu.user_s": (0, 10), "cpu.delay_s": (0, 30)}
    ),
    "compute-bound": MadeRun(read_ms=2, decode_ms=4),
    "launch-bound": MadeRun(decode_ms=2, on_core=0.9, facts={"ops_per_step": 800}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_verdict_names_what_was_planted(cause: str, tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, CAUSES[cause]))
    assert analysis.verdict.cause == cause, report_text(analysis)
    assert sum(analysis.parts.values()) == pytest.approx(1, abs=0.01)
    if cause != "compute-bound":
        assert analysis.advice[0].cause == cause
        assert analysis.advice[0].gain > 0.1
        assert analysis.verdict.low <= analysis.verdict.share <= analysis.verdict.high


def test_the_parts_of_each_step_add_up_to_its_time(tmp_path: Path) -> None:
    run = MadeRun(read_ms=8, open_ms=2, decode_ms=20, starved_ms=4, hand_over_ms=1, lock=0.1)
    steps = analyze(made_trace(tmp_path, run)).steps
    total = np.sum([steps.parts[name] for name in CATEGORIES], axis=0)
    np.testing.assert_allclose(total, steps.wall_s, rtol=1e-6)
    assert np.abs(steps.parts["unexplained"]).sum() < 0.01 * steps.wall_s.sum()


def test_waits_are_split_as_the_batch_went_through_them(tmp_path: Path) -> None:
    # One worker, one batch ahead: in the long run a step takes as long as its batch, of which the
    # loop hides the first 10 ms. What it waits for is the end of the batch: all of its decoding.
    run = MadeRun(workers=1, prefetch_factor=1, read_ms=20, decode_ms=10, compute_ms=10, steps=200)
    analysis = analyze(made_trace(tmp_path, run))
    step = analysis.step_mean_s
    assert step == pytest.approx(0.030, rel=0.02)
    assert analysis.parts["decode"] * step == pytest.approx(0.010, rel=0.05)
    assert analysis.parts["fetch"] * step == pytest.approx(0.010, rel=0.05)
    assert analysis.parts["compute"] * step == pytest.approx(0.010, rel=0.05)


def test_a_busy_disk_is_named_although_workers_decode_longer(tmp_path: Path) -> None:
    # Four workers: at nearly all times one of them reads, so decoding faster would gain nothing.
    run = MadeRun(workers=4, prefetch_factor=1, read_ms=40, decode_ms=42, compute_ms=2, steps=200)
    analysis = analyze(made_trace(tmp_path, run))
    pipe = pipeline_of(analysis)
    assert pipe is not None
    assert pipe.without(fetch=0) > pipe.without(decode=0)
    assert analysis.verdict.cause == "slow-disk"


def test_advice_for_the_verdict_comes_first_and_compute_bound_runs_get_none(tmp_path: Path) -> None:
    tiny = analyze(made_trace(tmp_path / "tiny", CAUSES["tiny-files"]))
    assert "pack_files" in tiny.advice[0].settings
    few = analyze(made_trace(tmp_path / "few", CAUSES["too-few-workers"]))
    assert "num_workers" in few.advice[0].settings
    assert not analyze(made_trace(tmp_path / "fine", CAUSES["compute-bound"])).advice


def test_one_busy_thread_is_not_launching_unless_its_operations_are_small(tmp_path: Path) -> None:
    for num_ops, cause in ((0, "compute-bound"), (16, "compute-bound"), (800, "launch-bound")):
        run = MadeRun(decode_ms=2, on_core=0.9, facts={"ops_per_step": num_ops})
        assert analyze(made_trace(tmp_path / str(num_ops), run)).verdict.cause == cause


def test_small_causes_of_one_group_outweigh_a_larger_one_of_another(tmp_path: Path) -> None:
    # Loading takes 6.5 of 13.5 ms in three ways; launching takes 3.9 ms, more than each of them.
    counters = {"cpu.user_s": (0.0, 40.0), "cpu.delay_s": (0.0, 0.0)}
    run = MadeRun(
        workers=8, decode_ms=108, hand_over_ms=3, compute_ms=10, on_core=0.56, lock=0.3,
        counters=counters, facts={"ops_per_step": 800, "cores": 8},
    )  # fmt: skip
    verdict = analyze(made_trace(tmp_path, run)).verdict
    shares = {f.cause: f.share for f in verdict.findings}
    assert max(shares, key=lambda cause: shares[cause]) == "launch-bound", shares
    assert verdict.cause != "launch-bound"
    assert "loading takes" in verdict.sentence
    assert verdict.runner_up is not None
    assert verdict.runner_up.cause == "launch-bound"


def test_what_the_pipeline_predicts_for_more_workers_comes_true(tmp_path: Path) -> None:
    run = MadeRun(workers=1, decode_ms=25, counters=IDLE, steps=150)
    before = analyze(made_trace(tmp_path / "before", run))
    pipe = pipeline_of(before)
    assert pipe is not None
    for workers in (2, 3):
        after = analyze(made_trace(tmp_path / str(workers), replace(run, workers=workers)))
        real = after.samples_s / before.samples_s - 1
        assert pipe.gain(workers=workers)[0] == pytest.approx(real, rel=0.1)


def test_waits_at_the_start_of_epochs_are_told_apart(tmp_path: Path) -> None:
    to = Recorder(tmp_path, role="train")
    worker = Recorder(tmp_path, role="worker")
    to.facts({"loader": "torch", "num_workers": 4, "cores": 4})
    now = MS
    for step in range(80):
        # Each of four epochs begins with a wait of 200 ms; other batches are ready.
        wait = 200 * MS if step % 20 == 0 else MS // 10
        span = {"step": step, "epoch": step // 20, "count": 8}
        worker.span(Kind.BATCH, now - MS, now + wait - 1, cpu_ns=wait, **span)
        to.span(Kind.NEXT, now, now + wait, wait_ns=wait, **span)
        now += wait + 10 * MS
    to.close()
    worker.close()
    analysis = analyze(read_trace(tmp_path))
    starts = epoch_start_wait(analysis)
    assert starts.share_of_waits > 0.95
    assert "start of epochs" in analysis.verdict.sentence
    first = analysis.advice[0]
    assert first.settings == {"loader": "penstock"}
    # Three epochs' starts are in the steps that count: without them a step takes 10 ms.
    assert first.gain_low < 200 * 3 / (79 * 10) < first.gain_high


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    for rank, own_ms in enumerate((10, 25, 10, 10)):
        to = Recorder(tmp_path, role="train", rank=rank)
        for step in range(50):
            begin, last = 27 * step * MS, 27 * step * MS + 26 * MS
            to.span(Kind.NEXT, begin, begin + MS // 10, step=step, epoch=0, count=4)
            to.span(Kind.COMMUNICATE, begin + own_ms * MS, last)
            to.span(Kind.LAUNCH, begin + MS // 10, last + MS, cpu_ns=MS, count=1)
        to.close()
    analysis = analyze(read_trace(tmp_path))
    assert analysis.verdict.cause == "straggler-rank"
    assert "rank 1" in analysis.verdict.sentence
    assert analysis.verdict.share == pytest.approx(15 / 27, abs=0.03)


def test_overlap_hides_all_but_the_last_collective(tmp_path: Path) -> None:
    gains = {}
    for pieces in (1, 2, 4):
        to = Recorder(tmp_path / str(pieces), role="train")
        for step in range(50):
            begin, end = 61 * step * MS, (61 * step + 60) * MS
            to.span(Kind.NEXT, begin, begin + MS, step=step, epoch=0, count=4)
            to.span(Kind.LAUNCH, begin + MS, end, cpu_ns=MS, count=1)
            for piece in range(pieces):  # 29 ms of computing, then 30 ms of collectives.
                sent = end - 30 * MS + 30 * MS * piece // pieces
                size = {"size_bytes": 1000}
                to.span(Kind.COMMUNICATE, sent, sent + 30 * MS // pieces, **size)
                to.span(Kind.COMMUNICATE, sent, sent + 1000, size_bytes=4)  # A bias.
        to.close()
        analysis = analyze(read_trace(tmp_path / str(pieces)))
        assert analysis.verdict.cause == "communication-bound"
        assert analysis.collectives_per_step == pytest.approx(pieces, rel=0.02)
        overlap = [a.gain for a in analysis.advice if "overlap_communication" in a.settings]
        gains[pieces] = overlap[0] if overlap else 0.0
    # With one piece nothing overlaps; with more, the backward pass of about 20 ms hides a part.
    assert gains[1] == 0.0
    assert gains[2] == pytest.approx(61 / (61 - 10) - 1, rel=0.1)
    assert gains[4] == pytest.approx(61 / (61 - 15) - 1, rel=0.1)


def test_resident_windows_measure_interference(tmp_path: Path) -> None:
    run = MadeRun(decode_ms=2, compute_ms=20, resident_compute_ms=8, window=15, steps=150)
    analysis = analyze(made_trace(tmp_path, run))
    assert analysis.interference.method == "differential"
    assert analysis.interference.real_s == pytest.approx(0.020, rel=0.02)
    assert analysis.interference.resident_s == pytest.approx(0.008, rel=0.02)
    assert analysis.interference.share == pytest.approx(0.6, abs=0.05)
    plain = analyze(
        made_trace(tmp_path / "plain", replace(run, window=0)), baseline=read_trace(tmp_path)
    )
    assert plain.parts["interference"] == pytest.approx(0.6, abs=0.05)
    # The machine was three times as slow when the job ran with windows: the ratio is the same.
    slow = replace(run, decode_ms=6, compute_ms=60, resident_compute_ms=24)
    slower = made_trace(tmp_path / "slow", slow)
    plain = analyze(read_trace(tmp_path / "plain"), baseline=slower)
    assert plain.parts["interference"] == pytest.approx(0.6, abs=0.05)


def test_cores_that_other_processes_use_are_not_blamed_on_the_job(tmp_path: Path) -> None:
    # The one thread of the job waits for a core nine tenths of the time; there are eight cores.
    counters = {"cpu.user_s": (0.0, 0.12), "cpu.delay_s": (0.0, 1.08)}
    run = MadeRun(decode_ms=2, no_core=0.9, counters=counters)
    analysis = analyze(made_trace(tmp_path, run))
    assert analysis.verdict.cause != "oversubscribed-cores"
    assert any("contended" in note for note in analysis.notes)


def test_reports_fit_their_width(tmp_path: Path) -> None:
    analysis = analyze(made_trace(tmp_path, CAUSES["slow-disk"], CAUSES["slow-disk"]))
    for width in (50, 80, 120):
        lines = report_text(analysis, width=width).splitlines()
        assert max(map(len, lines)) <= width, max(lines, key=len)
    assert analysis.verdict.sentence.split(":")[0] in verdict_text(analysis)
    assert analysis.as_json()["verdict"]["cause"] == "slow-disk"


def test_a_trace_without_a_loop_is_refused(tmp_path: Path) -> None:
    to = Recorder(tmp_path, role="train")
    to.span(Kind.READ, 1, 2, size_bytes=3)
    to.close()
    with pytest.raises(OptionError, match="no training loop"):
        analyze(read_trace(tmp_path))
