"""Modules of the room import each other in one direction, also where an import is deferred."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from penstock.step.program import nodes

ROOM = Path(nodes.__file__).parent
NAME = "penstock.step.program"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOM).with_suffix("").parts
    return ".".join([NAME, *(part for part in parts if part != "__init__")])


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports when it runs, at the top or in a function; not for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        yield from imported(node)


def test_no_module_imports_itself_through_others() -> None:
    trees = {module_name(path): ast.parse(path.read_text()) for path in ROOM.rglob("*.py")}
    graph = {
        # The room's own face imports nearly everything; importing *from* a package is not using it.
        name: {one for one in imported(tree) if one in trees and one not in (name, NAME)}
        for name, tree in trees.items()
    }
    assert len(graph) > 40
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


def test_no_import_stands_below_code() -> None:
    assert not [path for path in ROOM.parent.rglob("*.py") if "noqa: E402" in path.read_text()]
