"""Pictures are whole documents that need nothing else, on one scale."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from penstock.program import R, Region, S, language, mesh, program
from penstock.program.cost import Costs, Link
from penstock.program.explain import Explanation, explain
from penstock.program.picture import Picture, perfetto_json, picture_html, picture_svg

COSTS = Costs(links=(("tp", Link(bytes_s=1e8)),))


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


def _rects(svg: str) -> list[ET.Element]:
    found = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [rect for rect in found if len(rect)]


def test_each_task_is_drawn_in_proportion_to_its_time() -> None:
    pictures, _ = _pair()
    rects = _rects(picture_svg(pictures, "lanes"))
    assert len(rects) == 3 + 12
    spans = [span for picture in pictures for span in picture.timeline.spans]
    wide = sum(float(rect.attrib["width"]) for rect in rects)
    longest = max(rects, key=lambda rect: float(rect.attrib["width"]))
    share = max(s.seconds for s in spans) / sum(s.seconds for s in spans)
    assert abs(float(longest.attrib["width"]) / wide - share) < 0.01


def test_names_are_text_and_not_markup() -> None:
    pictures, _ = _pair()
    svg = picture_svg(pictures, 'a "title" <x>')
    ET.fromstring(svg)
    assert "<b>" not in svg


def test_numbers_stand_beside_a_name_of_any_length() -> None:
    timeline = _pair()[0][0].timeline
    names = ("short", "in chunks, overlapped", "word " * 20)
    svg = picture_svg([Picture(name=name, timeline=timeline) for name in names], "lanes")
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    heads = [text for text in texts if text.find("*[@class='name']") is not None]
    shown = [[span.text for span in head if "class" in span.attrib] for head in heads]
    assert [name for name, _ in shown][:2] == list(names[:2])
    assert all("a step" in numbers for _, numbers in shown)
    # In their column where the name leaves room, and after it where it does not.
    spots = [head[-1].attrib for head in heads]
    assert ["x" in spot for spot in spots] == [True, False, False]
    assert ["dx" in spot for spot in spots] == [False, True, True]
    assert len(shown[2][0]) < 45
    assert heads[2][0].text == names[2]


def test_documents_need_nothing_from_elsewhere_and_know_the_dark() -> None:
    pictures, said = _pair()
    page = picture_html(pictures, "lanes", said)
    links = re.findall(r"(?:href|src|url|@import)[=(]?\s*[\"']?(\w+://[^\"' )]+)", page)
    assert links == []
    assert "prefers-color-scheme:dark" in page
    assert "In short" in page


def test_perfetto_has_a_thread_for_each_lane_and_a_slice_for_each_task() -> None:
    pictures, _ = _pair()
    events = json.loads(perfetto_json(pictures))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "net:tp"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(p.timeline.spans) for p in pictures)
    assert all(e["dur"] >= 0 for e in slices)
