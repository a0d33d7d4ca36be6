"""OpenTelemetry with its own SDK, and TensorBoard with its own files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import penstock
from penstock.report.live.otel import instrument
from penstock.report.live.tensorboard import LoaderScalars


@pytest.fixture
def rows(tmp_path: Path) -> penstock.Dataset:
    np.save(tmp_path / "rows.npy", np.ones((640, 8), np.float32))
    return penstock.open(str(tmp_path / "rows.npy"))


def collected(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return {metric.name: list(metric.data.data_points) for metric in metrics}


def test_opentelemetry_reads_what_the_loader_counts(rows: penstock.Dataset) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    loader = penstock.Loader(rows, batch_size=64, workers=1)
    instrument(loader, provider)
    with loader:
        for _ in loader:
            pass
        found, stats = collected(reader), loader.stats()
    [samples] = found["penstock.samples"]
    assert (samples.value, dict(samples.attributes)) == (640, {"penstock.rank": 0})
    [read] = found["penstock.source.io"]
    assert read.value == stats.sources["folder"].size_bytes
    assert read.attributes["penstock.source"] == "folder"
    assert found["penstock.memory"][0].value > 0
    assert found["penstock.stall"][0].value == pytest.approx(stats.stall_s)
    provider.shutdown()


def test_a_loader_that_is_gone_reports_nothing(
    rows: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.report.live.otel._SAME_S", 0.0)
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    loader = penstock.Loader(rows, batch_size=64, workers="here")
    instrument(loader, provider)
    assert "penstock.samples" in collected(reader)
    del loader
    assert not collected(reader).get("penstock.samples")
    provider.shutdown()


def test_tensorboard_reads_back_what_was_written(rows: penstock.Dataset, tmp_path: Path) -> None:
    loader = penstock.Loader(rows, batch_size=64, workers="here")
    with loader, SummaryWriter(str(tmp_path / "board")) as writer:
        scalars = LoaderScalars(loader, writer)
        for number, _ in enumerate(loader):
            if number % 5 == 4:
                scalars.log(number)
        stats = loader.stats()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "penstock/samples_per_s", "penstock/stall_share", "penstock/decodes_at_a_time",
        "penstock/bytes_per_s/folder",
    }  # fmt: skip
    paces = events.Scalars("penstock/samples_per_s")
    assert [event.step for event in paces] == [4, 9]
    # Two equal halves of the samples: the run's pace lies between the paces of its halves.
    run = stats.samples / stats.elapsed_s
    assert min(e.value for e in paces) <= run * 1.5
    assert max(e.value for e in paces) >= run / 1.5
    assert all(0 <= event.value <= 1 for event in events.Scalars("penstock/stall_share"))
