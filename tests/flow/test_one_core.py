"""What decides is decided once: the engine and the simulators drive the same code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
DRIVERS = {
    "engine": [SOURCE / "engine"],
    "virtual time": [SOURCE / "simulate", Path(__file__).parents[2] / "testkit/virtual_cluster"],
}
RULES = {
    "Flow",
    "Holders",
    "FillCourse",
    "ClaimPatience",
    "MARKS_MAX",
    "SourcePrior",
    "may_fill",
    "may_plan",
    "requests_max",
    "stores_of",
    "routes_of",
}
"""Of `penstock.flow`, all that the two have in common."""


def imported(folders: list[Path]) -> set[str]:
    """Return what the files of some folders import from the flow."""
    return {
        name.name
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.flow")
        for name in node.names
    }


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_carries_drives_every_rule_of_the_flow(driver: str) -> None:
    assert imported(DRIVERS[driver]) >= RULES
