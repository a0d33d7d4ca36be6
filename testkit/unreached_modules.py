"""Modules of the source that are not reached from what users start: tests or benchmarks use them.

    python -m testkit.unreached_modules

A user starts what `ROOTS` lists. From there every import is followed, also inside functions, and
every string that reads like a module: verbs and names of packages are loaded by such strings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"
ROOTS = (
    "penstock", "penstock.__main__", "penstock.torch", "penstock.cli", "penstock.testing",
    "penstock.step", "penstock.step.trainers", "penstock.loader.dlio", "penstock.report.live",
    "penstock.trace.foreign",
)  # fmt: skip
"""Modules, and rooms with all that lies in them where other programs load it by name."""
_LOADED_BY_NAME = ROOTS[3:5] + ROOTS[6:]


def unreached_modules() -> list[str]:
    """Return the modules that cannot be reached from `ROOTS`."""
    modules = dict(_modules())
    todo = [name for name in modules if name in ROOTS or name.startswith(_LOADED_BY_NAME)]
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        if name in modules and name not in reached:
            reached.add(name)
            todo += [name.rpartition(".")[0], *_imports(name, modules[name])]
    return sorted(set(modules) - reached)


def _modules() -> Iterator[tuple[str, Path]]:
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def _imports(name: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module, *(f"{module}.{alias.name}" for alias in names))
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.:]+", text):
                dotted = text.replace(":", ".").lstrip(".")
                for base in ("", "penstock.", f"{name}."):
                    yield from (base + dotted, (base + dotted).rpartition(".")[0])


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in unreached_modules())
