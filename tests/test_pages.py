"""Pages say what the source is: its rooms, its variables, its results."""

from __future__ import annotations

import re
import tomllib

from benchmarks.results import ROOT, results
from benchmarks.results.page import CHANGED, PAGE, page

SOURCES = ROOT / "src" / "penstock"
INTERNAL_VARIABLES = {"PENSTOCK_RANK", "PENSTOCK_TRACE_WITH"}
"""What `penstock trace` tells the processes that it starts."""


def test_the_list_of_rooms_is_that_of_the_source_and_of_the_import_contract() -> None:
    there = {p.name for p in SOURCES.iterdir() if (p / "__init__.py").exists()}
    ground = {p.name for p in SOURCES.glob("*.py") if not p.name.startswith("__")}
    rows = re.findall(r"^\| (`.*`) \| .* \|$", _section("CONTRIBUTING.md", "## The house"), re.M)
    named = [name for row in rows for name in re.findall(r"`([\w./]+)`", row.split("| room")[0])]
    listed = {name.removesuffix("/") for name in named if name.endswith("/")}
    assert listed == there
    assert len(there) <= 12
    assert {name for name in named if name.endswith(".py")} == ground
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " ".join(contracts["contracts"][0]["layers"])
    assert there <= set(re.findall(r"penstock\.(\w+)", layers))


def test_every_variable_that_is_read_is_in_the_reference() -> None:
    used = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r"PENSTOCK_[A-Z_]+[A-Z]", path.read_text())
    }
    told = set(re.findall(r"`(PENSTOCK_[A-Z_]+)`", _section("docs/reference/api.md", "## Env")))
    assert used - INTERNAL_VARIABLES == told


def test_the_page_of_benchmarks_shows_the_results() -> None:
    assert _without_age(PAGE.read_text()) == _without_age(page())
    for result in results():
        for measured in result.measures:
            assert (ROOT / measured).exists(), f"{result.name} measures {measured}"


def _section(name: str, heading: str) -> str:
    text = (ROOT / name).read_text()
    return text[text.index(heading) :].split("\n## ", 1)[0].split("\n| the line")[0]


def _without_age(text: str) -> list[str]:
    """Return the lines that do not hang on later commits."""
    return [line.rstrip() for line in text.splitlines() if not line.startswith(CHANGED)]
