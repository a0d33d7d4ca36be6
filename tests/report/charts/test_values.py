"""What charts and pages are before a browser sees them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.charts.gallery import HOSTILE, gallery, heat, lanes, offsets, scaling

from penstock.report.charts import (
    Axis,
    BarChart,
    Bars,
    HeatMap,
    LaneChart,
    LaneSpans,
    Line,
    LineChart,
    Mark,
    Page,
    PageSection,
    PageTable,
    Points,
    Prose,
    ScatterChart,
    ecdf_line,
    histogram_line,
    page_html,
)
from penstock.report.charts.columns import column_spec

AXIS = Axis(name="n")


def unpacked(spec: object) -> np.ndarray:
    """What the page's script makes of a packed column."""
    assert isinstance(spec, dict)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(spec["packed"])), np.uint8)
    planes = planes.reshape(-1, spec["length"]).astype(np.int64)
    codes = sum(plane << (8 * number) for number, plane in enumerate(planes))
    codes = np.cumsum(codes) if spec["is_delta"] else codes
    top = 2 ** spec["bits"] - 1
    values = spec["low"] + codes * ((spec["high"] - spec["low"]) / (top - 1))
    values = np.exp(values) if spec["is_log"] else values
    return np.where(codes == top, np.nan, values)


@given(
    st.sampled_from([False, True]), st.sampled_from([False, True]), st.integers(0, 2**32),
    st.floats(-1e12, 1e12),
)  # fmt: skip
def test_a_packed_column_is_right_to_a_step_of_its_code(
    is_sorted: bool, has_gaps: bool, seed: int, start: float
) -> None:
    values = start + np.random.default_rng(seed).normal(0, 1000, 2000)
    values = np.sort(values) if is_sorted else values
    if has_gaps:
        values[::7] = np.nan
    found = unpacked(column_spec(values))
    step = (np.nanmax(values) - np.nanmin(values)) / 2 ** (18 if is_sorted and not has_gaps else 16)
    assert np.array_equal(np.isnan(found), np.isnan(values))
    assert np.nanmax(np.abs(found - values)) <= step


def test_a_column_for_a_logarithmic_axis_keeps_the_digits_of_small_values() -> None:
    values = np.geomspace(1e-6, 1e3, 4000)[::-1]
    found = unpacked(column_spec(values, log=True))
    assert np.abs(found / values - 1).max() < 1e-3
    assert np.isnan(unpacked(column_spec([*values, 0.0, -1.0], log=True))[-2:]).all()


class Parsed(HTMLParser):
    """What a browser would make of a page: tags, and the text that is not a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.specs: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.fetched += [str(given[key]) for key in ("src", "href", "data") if key in given]
        self._script = given if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif "data-chart" in self._script:
            self.specs.append(data)


def test_a_page_is_one_document_whose_names_are_only_text() -> None:
    page = Parsed(page_html(gallery(2000)))
    assert all(url.startswith(("#s", "data:,")) for url in page.fetched)
    # Nine charts, the library and our own script; no name has added one.
    assert page.tags.count("script") == 9 + 2
    assert "img" not in page.tags
    assert HOSTILE in page.text
    specs = [json.loads(spec) for spec in page.specs]
    assert specs[0]["lines"][0]["name"] == HOSTILE
    assert {spec["kind"] for spec in specs} == {"lines", "bars", "scatter", "heat map", "lanes"}


def test_the_library_can_stand_inside_of_a_page() -> None:
    for name in ("echarts.min.js", "charts.js"):
        script = (resources.files("penstock.report.charts") / "web" / name).read_text()
        assert not re.search(r"</script|<!--", script, re.IGNORECASE)


def test_small_charts_have_their_numbers_as_a_table_and_large_ones_do_not() -> None:
    section = PageSection(title="s", parts=[scaling(), lanes()])
    small = Parsed(page_html(Page(title="t", sections=[section])))
    assert small.text.count("The numbers") == 2
    assert "3.52 s (2.81 s to 4.39 s)" in small.text
    large = page_html(Page(title="t", sections=[PageSection(title="s", parts=[offsets(2000)])]))
    assert "The numbers" not in large


def test_the_table_of_lines_has_a_row_for_each_place() -> None:
    chart = LineChart(
        title="t", reading="r", x=AXIS, y=Axis(name="time", unit="s"),
        lines=[
            Line(name="a", x=[1, 2], y=[0.5, 1.5], low=[0.4, 1], high=[0.6, 2]),
            Line(name="b", x=[2, 3], y=[float("nan"), 90]),
        ],
    )  # fmt: skip
    assert chart.table() == (
        ["n", "a", "b"],
        [
            ["1", "500 ms (400 ms to 600 ms)", ""],
            ["2", "1.5 s (1 s to 2 s)", "–"],
            ["3", "", "1 min 30 s"],
        ],
    )


def test_a_chart_of_too_many_points_shows_some_and_says_so() -> None:
    group = Points(name="r", x=np.arange(10.0), y=np.arange(10.0))
    chart = ScatterChart(title="t", reading="r.", x=AXIS, y=AXIS, points=[group], points_max=4)
    assert chart.spec()["points"][0]["x"] == [0, 3, 6, 9]
    text = page_html(Page(title="t", sections=[PageSection(title="s", parts=[chart])]))
    assert "One of every 3 points is shown, of 10." in text


def test_a_short_row_fills_the_line_and_code_is_marked() -> None:
    table = PageTable(head=["a", "b", "c"], rows=[["1", "`x<y`"]], left=(0, -1))
    section = PageSection(title="s", parts=[table, Prose(text="one\n\ntwo `three`")])
    text = page_html(Page(title="t", sections=[section]))
    assert '<td class="left" colspan="2"><code>x&lt;y</code></td>' in text
    assert '<p class="plain">one</p><p class="plain">two <code>three</code></p>' in text
    # A page without charts does without the library.
    assert len(text) < 60_000


def test_distributions_of_nothing_and_of_one_value() -> None:
    assert len(histogram_line("n", []).x) == 0
    assert len(ecdf_line("n", []).x) == 0
    assert float(np.sum(histogram_line("n", [3.0] * 7, log=True).y)) == 7
    assert len(ecdf_line("n", np.arange(10_000)).x) <= 400


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Line(name="a", x=[1], y=[1, 2]), "different lengths"),
        (lambda: Line(name="a", x=[1], y=[1], low=[1]), "give low and high"),
        (lambda: Mark(label="m"), "either x or y"),
        (lambda: Axis(name="a", log=True, low=0), "cannot begin at 0"),
        (lambda: LineChart(title="t", reading="", x=AXIS, y=AXIS, lines=[]), "has no line"),
        (
            lambda: BarChart(title="t", reading="", category=AXIS, categories=["a"], value=AXIS,
                             bars=[Bars(name="b", values=[1, 2])]),
            "different lengths",
        ),
        (
            lambda: HeatMap(title="t", reading="", column=AXIS, columns=["1"], row=AXIS, rows=["1"],
                            value=AXIS, values=np.zeros((2, 1))),
            "shape",
        ),
        (
            lambda: LaneChart(title="t", reading="", x=AXIS, lanes=["a"], spans=[
                LaneSpans(name="k", lanes=[1], starts=[0], ends=[1], labels=["x"])]),
            "a span in lane 1",
        ),
    ],
)  # fmt: skip
def test_nonsense_is_refused(make: object, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        make()  # type: ignore[operator]


def test_a_heat_map_that_no_browser_draws_quickly_is_refused() -> None:
    size = 400
    names = [str(n) for n in range(size)]
    with pytest.raises(ValueError, match=r"160,000 cells; .* join neighbouring"):
        HeatMap(
            title="t", reading="", column=AXIS, columns=names, row=AXIS, rows=names, value=AXIS,
            values=np.zeros((size, size)),
        )  # fmt: skip
    assert heat().table()[1][0][0] == "0"
