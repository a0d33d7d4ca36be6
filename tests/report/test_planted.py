"""The verdict names a bottleneck that was planted into a real job.

Three strong ones that a busy machine does not hide: a slow store, long steps, long checkpoints. All
kinds, and what their advice gains, are `python -m benchmarks.planted`.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.planted.data import Sets
from benchmarks.planted.site import Site, throughput
from testkit.shaper import Fixed, Shape

from penstock.report.analysis.analyze import analyze
from penstock.report.analysis.values import Analysis
from penstock.trace.reading import read_trace


def analysis_of(site: Site, folder: Path) -> Analysis:
    throughput(site, trace=folder)
    return analyze(read_trace(folder))


def test_a_store_that_is_three_times_slower_than_the_steps_is_named(tmp_path: Path) -> None:
    site = Site(
        script="rows",
        data=Sets(tmp_path).array(160, 100_000),
        flags={"step_ms": 10, "epochs": 2},
        store=Shape(latency=Fixed(0.002), bandwidth_bytes_s=20e6),
    )
    found = analysis_of(site, tmp_path / "run")
    assert found.verdict.cause == "slow-store"
    assert found.advice[0].settings.keys() & {"cache_bytes", "store_bandwidth"}


def test_checkpoints_that_take_longer_than_the_steps_between_them_are_named(
    tmp_path: Path,
) -> None:
    saving = {"checkpoint": "SCRATCH/last.pt", "checkpoint_every": 4, "checkpoint_mb": 200}
    site = Site(
        script="images",
        data=Sets(tmp_path).files(512, 32),
        flags={"step_ms": 20, "num_workers": 1, "epochs": 1, **saving},
    )
    found = analysis_of(site, tmp_path / "run")
    assert found.verdict.cause == "checkpoint-interference"
    # Which of the two comes first depends on the disk: a copy costs as much as a file in memory.
    assert found.advice[0].settings.keys() & {"async_checkpoint", "checkpoint_every"}


def test_a_job_whose_steps_are_long_is_bound_by_them(tmp_path: Path) -> None:
    site = Site(
        script="images",
        data=Sets(tmp_path).files(512, 32),
        flags={"step_ms": 100, "num_workers": 1, "epochs": 1},
    )
    assert analysis_of(site, tmp_path / "run").verdict.cause == "compute-bound"
