"""What is drawn, written and printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.policies import POLICIES
from benchmarks.scale import LATER_EPOCH
from tests.simulate.scenarios import cached

from penstock.cli.main import main
from penstock.report.charts import BarChart, LineChart
from penstock.simulate import PolicyResult, run, sweep
from penstock.simulate.page import (
    COLUMNS,
    panels_of,
    results_charts,
    results_html,
    row_of,
)

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


def test_one_point_is_bars_with_a_name_and_a_value_each() -> None:
    policies = (POLICIES["naive"], POLICIES["lbann-dynamic"], "ours", POLICIES["perfect"])
    results = [run(cached(0.5), policy) for policy in policies]
    (chart,) = results_charts(results)
    assert isinstance(chart, BarChart)
    assert list(chart.categories) == ["naive", "Penstock", "perfect"]  # LBANN needs more memory.
    assert list(chart.bars[0].values)[-1] == pytest.approx(1.0)
    assert list(chart.highlighted) == [1]
    assert results_charts([results[1]]) == []


def test_a_sweep_is_a_line_for_each_policy() -> None:
    results = list(sweep(cached(1), policies=["lru", "ours"], nodes=[2, 4, 8]))
    (chart,) = results_charts(results)
    assert isinstance(chart, LineChart)
    assert (chart.x.name, chart.y.name) == ("nodes", "time over computing alone")
    assert [(line.name, list(line.x)) for line in chart.lines] == [
        ("LRU", [2, 4, 8]),
        ("Penstock", [2, 4, 8]),
    ]
    assert list(chart.lines[0].y) == [r.time_ratio for r in results if r.policy == "lru"]


def test_seconds_have_a_line_for_the_least_possible() -> None:
    results = list(sweep(cached(0.5), policies=["lru", "ours"], nodes=[2, 4, 8]))
    (chart,) = results_charts(results, LATER_EPOCH)
    assert isinstance(chart, LineChart)
    assert [line.name for line in chart.lines] == ["LRU", "Penstock", "the least possible"]
    assert all(r.epoch_s[-1] >= r.least_later_s * (1 - 1e-9) for r in results)


def test_a_sweep_of_both_has_a_chart_for_each_capacity() -> None:
    results = list(sweep(cached(1), policies=["ours"], nodes=[2, 4], cache=[0.5, 1]))
    names = ["cache 50% of the data set", "cache 100% of the data set"]
    assert [name for name, _ in panels_of(results)] == names
    charts = results_charts(results)
    assert [chart.title for chart in charts] == names
    (by_cache,) = results_charts([r for r in results if r.nodes == 2])
    assert isinstance(by_cache, LineChart)
    assert by_cache.x.name == "cache over data set"


def test_the_page_has_the_chart_and_every_row_escaped() -> None:
    results = [run(cached(0.5), policy) for policy in ("ours", POLICIES["lbann-dynamic"])]
    page = results_html(results, "a <b> title")
    assert page.count('class="chart"') == 1
    assert "<h1>a &lt;b&gt; title</h1>" in page
    assert "do not fit into" in page


def test_a_row_has_a_word_for_every_column() -> None:
    for policy in ("ours", POLICIES["lbann-dynamic"]):
        assert len(row_of(run(cached(0.5), policy))) == len(COLUMNS)
    assert row_of(PolicyResult(policy="mine", nodes=1, cache_share=0.0, time_s=5.0))[0] == "mine"


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "s.toml").write_text(SCENARIO)
    return str(tmp_path / "s.toml")


def test_the_command_prints_a_table_and_a_chart(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "o.html"
    assert main(["simulate", path, "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert "4 nodes, cache 50% of the data set" in printed
    assert "█" in printed
    assert max(map(len, printed.splitlines()[:-4])) <= 80
    assert "<h1>a &lt;small&gt; cluster</h1>" in html.read_text()


def test_the_command_says_why_a_policy_cannot_run(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", path, "--cache", "0"]) == 0
    reason = "parallel staging: its storage does not hold a single sample"
    assert reason in capsys.readouterr().out


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
