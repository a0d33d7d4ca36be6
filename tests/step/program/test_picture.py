"""Pictures of lanes: every task, on one scale."""

import json
import re
from dataclasses import replace

from penstock.step.program import R, Region, S, language, mesh, program
from penstock.step.program.cost import Link, MachineCosts
from penstock.step.program.explain import Explanation, explain
from penstock.step.program.picture import Picture, perfetto_json, picture_chart, picture_html

COSTS = MachineCosts(links=(("tp", Link(bytes_s=1e8)),))


@program(axis="tp")
def block(x: S(1)["t", 64], w: S(0)[64, 64], r: R["t", 64]):
    return language.all_reduce(x @ w) + r


def _pair() -> tuple[list[Picture], list[Explanation]]:
    made = block.on(mesh(tp=2), t=4096)
    names = tuple(n.name for n in made.nodes if n.inputs)
    dims = tuple((name, 0) for name in (*names, "x", "r"))
    cut = Region(name="c", kind="chunk", nodes=names, num_chunks=4, dims=dims)
    after = replace(made, regions=(cut, Region(name="o", kind="overlap", nodes=names)))
    said = [explain(made, COSTS), explain(after, COSTS)]
    names_of = ("before <b>", "after & more")
    return [
        Picture(name=name, timeline=e.timeline) for name, e in zip(names_of, said, strict=True)
    ], said


def test_each_task_is_a_span_in_its_lane_as_long_as_it_takes() -> None:
    pictures, _ = _pair()
    for picture in pictures:
        chart = picture_chart(picture, 1.0)
        drawn = {
            (chart.lanes[lane], label, round(end - start, 9))
            for kind in chart.spans
            for lane, label, start, end in zip(
                kind.lanes, kind.labels, kind.starts, kind.ends, strict=True
            )
        }
        spans = picture.timeline.spans
        assert drawn == {(s.task.lane, s.task.name, round(s.seconds, 9)) for s in spans}
        assert chart.marks[0].x == picture.window_s


def test_all_timelines_of_a_page_have_one_scale_and_their_numbers() -> None:
    pictures, said = _pair()
    page = picture_html(pictures, 'a "title" <x>', said)
    blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    before_s, after_s = (json.loads(block)["x"]["high"] for block in blocks)
    assert before_s == after_s >= max(p.window_s for p in pictures)
    assert "<h3>before &lt;b&gt;</h3>" in page
    assert page.count("a step · ") >= 2
    assert "after &amp; more, in words" in page
    assert "In short" in page


def test_perfetto_has_a_thread_for_each_lane_and_a_slice_for_each_task() -> None:
    pictures, _ = _pair()
    events = json.loads(perfetto_json(pictures))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "net:tp"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(p.timeline.spans) for p in pictures)
    assert all(e["dur"] >= 0 for e in slices)
