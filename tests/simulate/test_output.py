"""What is drawn, written and printed."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.simulate.scenarios import cached

from penstock.cli.main import main
from penstock.simulate import Result, run, sweep
from penstock.simulate.chart import LATER_EPOCH, chart_svg, panels_of
from penstock.simulate.page import COLUMNS, page_html, row_of

SVG = "{http://www.w3.org/2000/svg}"
SCENARIO = """
name = "a <small> cluster"
[dataset]
num_samples = 1200
sample_bytes = "100 kB"
[job]
epochs = 2
nodes = 4
batch = 10
compute_samples_s = 1000
[machine.store]
latency_s = 0.001
latency_p99_s = 0.002
throughput = { counts = [1, 8], bytes_s = ["50 MB", "200 MB"] }
[machine.link]
bytes_s = "1 GB"
[[machine.tiers]]
kind = "memory"
capacity_bytes = "15 MB"
read = { counts = [1], bytes_s = ["9 GB"] }
write = { counts = [1], bytes_s = ["9 GB"] }
"""


def words(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_one_point_is_bars_with_a_label_and_a_value_each() -> None:
    results = [run(cached(0.5), name) for name in ("naive", "lbann-dynamic", "ours", "perfect")]
    shown = words(chart_svg(results, "title"))
    assert {"naive", "Penstock", "perfect", "1.00", "title"} <= set(shown)
    assert "LBANN dynamic" not in shown
    assert any("time over computing alone" in word for word in shown)


def test_a_sweep_is_lines_with_axes_and_a_legend() -> None:
    results = list(sweep(cached(1), policies=["lru", "ours"], nodes=[2, 4, 8]))
    svg = chart_svg(results, "title")
    shown = words(svg)
    assert {"nodes", "time over computing alone", "LRU", "Penstock", "2", "4", "8"} <= set(shown)
    lines = ElementTree.fromstring(svg).findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]
    assert len({line.attrib["class"] for line in lines}) == 2
    assert "prefers-color-scheme:dark" in svg


def test_seconds_have_a_line_for_the_least_possible() -> None:
    results = list(sweep(cached(0.5), policies=["lru", "ours"], nodes=[2, 4, 8]))
    svg = chart_svg(results, "title", LATER_EPOCH)
    assert {"the least possible", "seconds of an epoch after the first", "0.3"} <= set(words(svg))
    assert len(ElementTree.fromstring(svg).findall(f"{SVG}polyline")) == 3
    assert all(r.epoch_s[-1] >= r.least_later_s * (1 - 1e-9) for r in results)


def test_a_sweep_of_both_has_a_panel_for_each_capacity() -> None:
    results = list(sweep(cached(1), policies=["ours"], nodes=[2, 4], cache=[0.5, 1]))
    assert [name for name, _ in panels_of(results)] == [
        "cache 50% of the data set",
        "cache 100% of the data set",
    ]
    assert words(chart_svg(results, "t")).count("nodes") == 2
    assert "cache over data set" in words(chart_svg(results[:2], "t"))


def test_lines_stay_inside_the_picture() -> None:
    results = list(sweep(cached(1), nodes=[1, 2, 8], cache=[0.1, 1]))
    root = ElementTree.fromstring(chart_svg(results, "t"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_the_page_has_the_chart_and_every_row_escaped() -> None:
    results = [run(cached(0.5), name) for name in ("ours", "lbann-dynamic")]
    page = page_html(results, "a <b> title")
    assert "<svg" in page
    assert "a &lt;b&gt; title" in page
    assert page.count("<tr") == 3
    assert "do not fit into" in page


def test_a_row_has_a_word_for_every_column() -> None:
    for name in ("ours", "lbann-dynamic"):
        assert len(row_of(run(cached(0.5), name))) == len(COLUMNS)
    assert row_of(Result(policy="mine", nodes=1, cache_share=0.0, time_s=5.0))[0] == "mine"


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "s.toml").write_text(SCENARIO)
    return str(tmp_path / "s.toml")


def test_the_command_prints_a_table_and_a_chart(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html = tmp_path / "o.svg", tmp_path / "o.html"
    assert main(["simulate", path, "--svg", str(svg), "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert "4 nodes, cache 50% of the data set" in printed
    assert "█" in printed
    assert "LBANN dynamic: it needs the whole set in memory" in printed
    assert max(map(len, printed.splitlines()[:-4])) <= 80
    assert "a &lt;small&gt; cluster" in svg.read_text()
    assert "<table>" in html.read_text()


def test_the_command_sweeps(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policies", "ours,lru", "--nodes", "2,4", "--cache", "0.5,1"]
    assert main(["simulate", path, *words]) == 0
    printed = capsys.readouterr().out
    assert "2 nodes, cache 100% of the data set" in printed
    assert "Time over computing alone, by nodes; cache 50% of the data set" in printed


def test_the_command_speaks_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", path, "--policies", "ours", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["policy"] == "ours"
    assert result["byte_ratio"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--nodes", "2,x"], "--nodes '2,x'"),
        (["--nodes", "1.5"], "--nodes '1.5'"),
        (["--cache", "-1"], "--cache"),
        (["--policies", "our"], "did you mean 'ours'?"),
    ],
)
def test_a_bad_option_is_an_error_of_one_line(
    path: str, options: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", path, *options]) == 1
    assert hint in capsys.readouterr().err
