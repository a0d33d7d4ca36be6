"""Modules that are imported by name, since nothing else would notice when they move."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock

SOURCES = Path(penstock.__file__).parent
NAME = re.compile(r'"(penstock\.(?:engine|loader|torch)\.[\w.]*)')
NAMED = {
    (name, str(path.relative_to(SOURCES)))
    for room in ("engine", "loader")
    for path in (SOURCES / room).rglob("*.py")
    for name in NAME.findall(path.read_text())
}


@pytest.mark.parametrize(("name", "path"), sorted(NAMED))
def test_a_module_that_is_imported_by_name_exists(name: str, path: str) -> None:
    spec = find_spec(name.rstrip("."))
    assert spec is not None, f"{path} imports {name}"
    # A name that ends with a dot is put together with one that comes later: of a package only.
    assert not name.endswith(".") or spec.submodule_search_locations


def test_they_are_found() -> None:
    assert {name for name, _ in NAMED} >= {
        "penstock.loader.torch.losses",
        "penstock.loader.torch.tensors",
        "penstock.loader.torch.world",
    }
