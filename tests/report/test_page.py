"""Reports of runs in a real browser: drawn, silent, alone, small, and with names as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from testkit.browser import Browser, why_no_browser

import penstock
from penstock.cli.main import main
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

PAGE_BYTES_MAX = 5e6
NUM_READS = 1_000_000
NUM_STEPS = 200
MS = 1_000_000
EVIL = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of Penstock's loader that differ in their batch size; their data has a bad name."""
    root = tmp_path_factory.mktemp("runs")
    data = root / "<b>rows<b>.npy"
    np.save(data, np.zeros((512, 4_000), np.uint8))
    folders = root / "small", root / "large"
    for folder, batch_size in zip(folders, (8, 32), strict=True):
        with penstock.Loader(
            penstock.open(str(data)),
            batch_size=batch_size,
            epochs=3,
            workers="here",
            trace=str(folder),
        ) as loader:
            for _ in loader:
                pass
    return folders


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with a million reads, of files whose names are markup."""
    folder = tmp_path_factory.mktemp("million")
    recorder = Recorder(folder, role="train")
    recorder.facts({"loader": "torch", "batch_size": 32, "command": EVIL})
    files = [recorder.name(f"{EVIL}{number}.jpg") for number in range(100)]
    random = np.random.default_rng(0).permutation(NUM_READS).tolist()
    per_step = NUM_READS // NUM_STEPS
    for step in range(NUM_STEPS):
        begin = step * 30 * MS + 1
        recorder.span(
            Kind.NEXT, begin, begin + 20 * MS, wait_ns=20 * MS, count=32, step=step, epoch=0
        )
        for at, place in enumerate(random[step * per_step : (step + 1) * per_step]):
            read = begin + at * 5_000
            recorder.span(
                Kind.READ,
                read,
                read + 4_000,
                object_id=files[place % 100],
                offset=place // 100 * 4_096,
                size_bytes=4_096,
                step=step,
                epoch=0,
            )
    recorder.close()
    return folder


def opened(browser: Browser, path: Path, **look: int) -> int:
    """Show a report, check what holds for all of them, and return how many charts it has."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= PAGE_BYTES_MAX
    num_charts = text.count('class="chart"')
    browser.look(**look)
    browser.show(text, num_charts)
    assert browser.logs() == []
    assert [url.rsplit("/", 1)[1] for url in browser.requests()] == ["page.html"]
    assert all(browser.is_drawn(chart) for chart in range(num_charts))
    width = look.get("width", 1200)
    assert browser.value("document.documentElement.scrollWidth") == width
    return num_charts


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390, "height": 800}])
def test_the_report_of_a_run_is_drawn_without_a_request_or_a_complaint(
    browser: Browser, runs: tuple[Path, Path], look: dict[str, int]
) -> None:
    assert main(["report", str(runs[0])]) == 0
    assert opened(browser, runs[0] / "report.html", **look) >= 8
    titles = browser.value("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert titles[:3] == ["Verdict", "What to change", "Where a step's time goes"]
    assert {"Sources", "Sizes and times", "Scaling", "Parameters", "Phases"} <= set(titles)


def test_a_million_reads_fit_a_page_that_zooms_and_changes_its_theme(
    browser: Browser, large: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(large), "--html", str(page)]) == 0
    opened(browser, page)
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text
    assert browser.value("window.hacked") is None
    kinds = browser.value("penstockCharts.map(c => c.getOption().series[0]?.type)")
    scatter = kinds.index("scatter")
    points = f"penstockCharts[{scatter}].getOption().series[0].data.length / 2"
    assert browser.value(points) == NUM_READS
    area = f"document.getElementById('chart{scatter}')"
    browser.value(f"{area}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = browser.value(f"{area}.getBoundingClientRect().toJSON()")
    left, top = box["x"] + box["width"] / 3, box["y"] + box["height"] / 3
    browser.drag((left, top), (left + 200, top + 60))
    zoom = f"penstockCharts[{scatter}].getOption().dataZoom[0]"
    browser.wait(f"{zoom}.end - {zoom}.start < 50")
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.value(background)
    browser.value("document.getElementById('theme').click()")
    assert browser.value(background) != light
    assert browser.logs() == []


def test_the_terminal_has_the_report_as_text_and_as_json(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs[0]), "--text"]) == 0
    text = capsys.readouterr().out
    assert all(title in text for title in ("Where the time of a step goes", "Advice", "Phases"))
    assert max(map(len, text.splitlines())) <= 80
    assert main(["report", str(runs[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 3 * 512 // 8


def test_two_runs_are_compared_in_the_terminal_and_on_a_page(
    browser: Browser,
    runs: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "compared.html"
    assert main(["compare", *map(str, runs), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "small" in text
    assert "batch size of a rank" in text
    assert max(map(len, text.splitlines())) <= 80
    assert opened(browser, page) == 2
    assert main(["compare", *map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["batch size of a rank"] == ["8", "32"]
