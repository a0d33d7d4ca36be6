"""Names of the source that the source itself does not use: dead, or there for tests alone.

    python -m testkit.dead_names

A function, class, method or constant counts as used if its name occurs anywhere in the source as a
name that is read, an attribute, a keyword, or a string. A name that several things have is
therefore found only when all of them are dead. Names in docs/reference/api.md are for users, and
so is the whole of `penstock.testing`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "penstock"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def dead_names() -> dict[str, int]:
    """Return names that nothing uses, as `file:name`, with the lines of each."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    used = {name for tree in trees.values() for node in ast.walk(tree) for name in _used(node)}
    used |= set(re.findall(r"\w+", (ROOT / "docs/reference/api.md").read_text()))
    found = {}
    for path, tree in trees.items():
        where = path.relative_to(SOURCES)
        if where.parts[0] != "testing":
            for name, node in _defined(tree):
                if name not in used and not name.startswith("__"):
                    found[f"{where}:{name}"] = (node.end_lineno or 0) - node.lineno + 1
    return found


def _used(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name
        case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.:]+", text):
            yield re.split("[.:]", text)[-1]
        case ast.MatchClass(kwd_attrs=names):
            yield from names


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name, body=body):
                yield name, node
                yield from ((some.name, some) for some in body if isinstance(some, _Definition))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node


if __name__ == "__main__":
    for name, num_lines in dead_names().items():
        sys.stdout.write(f"{num_lines:4} {name}\n")
