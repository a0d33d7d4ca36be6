"""What is public is what docs/reference/api.md lists, and the other way round."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGE = (REFERENCE / "api.md").read_text()
STEP_PAGE = (REFERENCE / "step.md").read_text()


def listed() -> dict[str, list[str]]:
    """The names of each module in the list at the top of the page."""
    block = re.search(r"```text\n(.*?)```", PAGE, re.S)
    assert block is not None
    entries = re.split(r"\n(?=\S)", block[1].strip())
    names = {}
    for entry in entries:
        module, _, rest = entry.partition(" ")
        words = [word.strip() for word in rest.split(":")[0].split(",")]
        names[module] = [word for word in words if re.fullmatch(r"[\w.]+", word)]
    return names


LISTED = listed()
EXACT = ("penstock", "penstock.order", "penstock.torch")
"""Modules whose `__all__` is the list, no more and no less."""


def names_in(module: str) -> set[str]:
    """The names that a module defines or imports, without importing it."""
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def test_the_list_names_every_public_module() -> None:
    assert {"penstock.step", "penstock.machine", "penstock.testing", *EXACT} <= LISTED.keys()


@pytest.mark.parametrize("module", EXACT)
def test_a_module_gives_the_names_that_are_listed_and_no_others(module: str) -> None:
    assert sorted(import_module(module).__all__) == sorted(LISTED[module])


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in LISTED.items() if module not in EXACT for name in names],
)
def test_a_listed_name_is_where_the_page_says(module: str, name: str) -> None:
    inside, _, name = name.rpartition(".")
    assert name in names_in(f"{module}.{inside}" if inside else module)


def test_step_gives_the_names_that_its_pages_explain() -> None:
    step = set(import_module("penstock.step").__all__)
    section = re.search(r"\n## penstock\.step\n(.*?)\n## ", PAGE, re.S)
    assert section is not None
    block = re.search(r"```text\n(.*?)```", section[1], re.S)
    assert block is not None
    shown = set(re.findall(r"^(\w+)", block[1], re.M))
    assert shown <= step, f"on the page and not public: {sorted(shown - step)}"
    explained = set(re.findall(r"\w+", section[1] + STEP_PAGE))
    assert step <= explained, f"public and on no page: {sorted(step - explained)}"


def test_what_is_for_testing_is_where_the_page_says() -> None:
    section = PAGE.partition("\n## penstock.testing\n")[2].partition("\n## ")[0]
    dotted = re.findall(r"`(\w+)\.(\w+)`", section)
    assert dotted
    for module, name in dotted:
        assert name in names_in(f"penstock.testing.{module}"), f"{module}.{name}"
    for module in re.findall(r"`(\w+)`:", section):
        assert find_spec(f"penstock.testing.{module}") is not None, module


def test_every_error_can_be_caught_as_one() -> None:
    errors = import_module("penstock.errors")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ == "penstock.errors"]
    assert own
    assert all(issubclass(kind, errors.PenstockError) for kind in own)
