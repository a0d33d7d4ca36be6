"""The names in the engine's README are those of the code."""

import ast
import re
from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent
README = (SOURCES / "engine" / "README.md").read_text()


def classes() -> dict[str, set[str]]:
    """Classes of the source with their methods."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
                found.setdefault(node.name, set()).update(methods)
    return found


def test_classes_and_methods_exist() -> None:
    known = classes()
    named = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", README)
    assert len(named) > 20
    for name, method in named:
        assert name in known, name
        assert not method or method in known[name], f"{name}.{method}"


def test_threads_have_these_names() -> None:
    source = "".join(path.read_text() for path in (SOURCES / "engine").rglob("*.py"))
    for name in re.findall(r"`penstock-(\w+)`", README):
        # The runner puts the first half in front of its threads' names.
        assert f"penstock-{name}" in source or f'"{name}-' in source, name
