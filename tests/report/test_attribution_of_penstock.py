"""Waits of Penstock's own loader: by epoch and step of its rows, and in real runs."""

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.phases import epoch_of_rows
from penstock.report.analysis.values import CATEGORIES
from penstock.trace.reading import read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

MS = 1_000_000


def test_batches_are_found_by_epoch_and_step(tmp_path: Path) -> None:
    to = Recorder(tmp_path, role="train")
    to.facts({"loader": "penstock"})
    for step in range(40):
        at = step * 20 * MS + 1
        about = {"step": step, "epoch": 0}
        s3 = to.name("s3://bucket/data")
        # Waits 12 ms: 6 for the store, 3 decoding, 1 joined, 2 on its way. The next batch is
        # fetched meanwhile, which delays nobody.
        to.span(Kind.NEXT, at, at + 12 * MS, wait_ns=12 * MS, count=4, **about)
        to.span(Kind.FETCH, at - 4 * MS, at + 6 * MS, source_id=s3, size_bytes=9, **about)
        to.span(Kind.DECODE, at + 6 * MS, at + 9 * MS, count=4, **about)
        to.span(Kind.JOIN, at + 9 * MS, at + 10 * MS, **about)
        to.span(Kind.FETCH, at, at + 19 * MS, source_id=s3, size_bytes=9, step=step + 1, epoch=0)
    to.close()
    analysis = analyze(read_trace(tmp_path))
    step = analysis.step_mean_s * 1e3
    assert analysis.parts["decode"] * step == pytest.approx(4, rel=0.06)
    assert analysis.parts["hand-over"] * step == pytest.approx(2, rel=0.06)
    assert analysis.fetch_by_source["s3://bucket"] * step == pytest.approx(6, rel=0.06)
    assert analysis.parts["compute"] * step == pytest.approx(8, rel=0.06)
    assert analysis.verdict.cause == "slow-store"


def test_a_real_run_of_penstock_is_explained(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((256, 4_000), np.uint8))
    run = tmp_path / "run"
    with penstock.Loader(
        penstock.open(str(tmp_path / "rows.npy")),
        batch_size=8,
        epochs=2,
        workers="here",
        trace=str(run),
    ) as loader:
        num_steps = sum(1 for _ in loader)
    trace = read_trace(run)
    analysis = analyze(trace)
    assert analysis.num_steps == num_steps
    assert analysis.num_samples == 512
    assert [e.num_samples for e in analysis.epochs] == [256, 256]
    steps = analysis.steps
    total = np.sum([steps.parts[name] for name in CATEGORIES], axis=0)
    np.testing.assert_allclose(total, steps.wall_s, rtol=1e-6, atol=1e-9)
    assert set(epoch_of_rows(trace.of(Kind.NEXT), ())) == {0, 1}
