"""What decides is decided once: the engine and the simulator drive the same code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
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


def imported(room: str) -> set[str]:
    """Return what the files of a room import from the flow."""
    return {
        name.name
        for path in (SOURCE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.flow")
        for name in node.names
    }


@pytest.mark.parametrize("room", ["engine", "simulate"])
def test_a_room_that_carries_drives_every_rule_of_the_flow(room: str) -> None:
    assert imported(room) >= RULES
