"""Metrics over real HTTP, as Prometheus' own parser reads them, and `top` that asks for them."""

import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.engine.metrics import PORT_VARIABLE, metrics_text, snapshots_of
from penstock.engine.snapshot import LiveCounts, LiveSnapshot
from penstock.engine.stats import SourceStats
from penstock.errors import OptionError
from penstock.report.live.scraping import ScrapedRun

_HEARD_S_MAX = 20.0
Found = dict[tuple[str, str], float]
"""Value of a metric by its name and the label of its own."""


def parsed(page: str) -> Found:
    found: Found = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            own = sample.labels.get("source") or sample.labels.get("role") or ""
            found[sample.name, own] = sample.value
    return found


def scraped(port: int) -> Found:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parsed(answer.read().decode())


def scraped_after(port: int, *, num_samples: int) -> Found:
    """Scrape once the engine has heard that so many samples were taken: it hears it a bit later."""
    deadline_s = time.monotonic() + _HEARD_S_MAX
    while (found := scraped(port))["penstock_samples_total", ""] < num_samples:
        assert time.monotonic() < deadline_s, found
    return found


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number: int = taken.getsockname()[1]
    monkeypatch.setenv(PORT_VARIABLE, str(number))
    return number


@pytest.fixture
def rows(tmp_path: Path) -> penstock.Dataset:
    np.save(tmp_path / "rows.npy", np.ones((640, 8), np.float32))
    return penstock.open(str(tmp_path / "rows.npy"))


@pytest.mark.parametrize("workers", [1, "here"])
def test_the_endpoint_says_what_the_loader_counts(
    rows: penstock.Dataset, port: int, workers: int | str
) -> None:
    with penstock.Loader(rows, batch_size=64, epochs=2, workers=workers) as loader:
        for _ in loader:
            pass
        stats, found = loader.stats(), scraped_after(port, num_samples=1280)
        # A second look is never lower: these are counters.
        assert all(scraped(port)[key] >= value for key, value in found.items() if "total" in key[0])
    assert found["penstock_samples_total", ""] == stats.samples == 1280
    assert found["penstock_batches_total", ""] == 20
    assert found["penstock_source_bytes_total", "folder"] == stats.sources["folder"].size_bytes > 0
    assert found["penstock_stall_seconds_total", ""] == pytest.approx(stats.stall_s, abs=0.05)
    assert found["penstock_elapsed_seconds_total", ""] >= found["penstock_stall_seconds_total", ""]
    assert found["penstock_memory_bytes", ""] > 0
    roles = {own for name, own in found if name == "penstock_cpu_seconds_total"}
    assert roles == ({"train"} if workers == "here" else {"engine", "worker"})
    with pytest.raises(urllib.error.URLError):
        scraped(port)  # It ends with the loader.


def test_two_loaders_of_a_rank_have_two_ports(rows: penstock.Dataset, port: int) -> None:
    world = penstock.World(rank=0, num_ranks=2)  # Both ranks on this node: the next port is theirs.
    train = penstock.Loader(rows, batch_size=64, workers="here", world=world)
    validate = penstock.Loader(rows, batch_size=32, workers="here", world=world)
    with train, validate:
        batches = iter(train), iter(validate)
        assert len(next(batches[0])["data"]) == 64
        assert len(next(batches[1])["data"]) == 32
        assert scraped(port)["penstock_samples_total", ""] == 64
        assert scraped(port + 2)["penstock_samples_total", ""] == 32


def test_a_run_does_not_fail_for_want_of_a_port(
    rows: penstock.Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # The only port that local rank 0 of so many ranks may take is in use.
        monkeypatch.setenv(PORT_VARIABLE, str(taken.getsockname()[1]))
        world = penstock.World(rank=0, num_ranks=65535)
        loader = penstock.Loader(
            rows, global_batch_size=65535, workers="here", world=world, drop_last=False
        )
        with loader:
            assert sum(1 for _ in loader) == 1
    assert "none of the ports" in caplog.text


def test_a_port_that_is_none_is_an_error(
    rows: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "http")
    with pytest.raises(OptionError, match="PENSTOCK_METRICS_PORT must be a port"):
        next(iter(penstock.Loader(rows, batch_size=64, workers="here")))


def test_top_asks_endpoints_and_knows_those_that_fell_silent(
    rows: penstock.Dataset, port: int
) -> None:
    run = ScrapedRun([f"http://127.0.0.1:{port}"])
    with pytest.raises(OptionError, match="no rank answers"):
        run.look()
    with penstock.Loader(rows, batch_size=64, workers="here") as loader:
        batches = iter(loader)
        next(batches)
        [first] = run.look()
        for _ in range(4):
            next(batches)
        [second] = run.look()
    assert (first.now.counts.samples, second.now.counts.samples) == (64, 320)
    assert second.recent.samples == 256
    [silent] = run.look()
    assert (silent.now.state, silent.now.counts.samples) == ("silent", 320)


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=8)


@given(
    host=TEXTS,
    sources=st.dictionaries(TEXTS, st.integers(0, 2**50), max_size=3),
    samples=st.integers(0, 2**50),
    ready=st.none() | st.integers(0, 99),
)
def test_a_page_is_read_back_as_it_was(
    host: str, sources: dict[str, int], samples: int, ready: int | None
) -> None:
    counts = LiveCounts(
        samples=samples,
        batches=3,
        elapsed_s=2.5,
        stall_s=0.125,
        sources={
            name: SourceStats(size_bytes=n, requests=n % 7, seconds=0.5)
            for name, n in sources.items()
        },
        cpu_s={"engine": 1.5},
    )
    snapshot = LiveSnapshot(
        rank=7, host=host, at_s=1.0, epoch=2, counts=counts, ready_batches=ready
    )
    page = metrics_text([snapshot])
    assert snapshots_of(page, 1.0) == [snapshot]
    families = list(text_string_to_metric_families(page))
    labels = {s.labels["source"] for f in families for s in f.samples if "source" in s.labels}
    assert labels == set(sources)
