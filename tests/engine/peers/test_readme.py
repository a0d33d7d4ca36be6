"""The page on the life of a request names what is in the source."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src" / "penstock"
PAGE = (SOURCES / "engine" / "peers" / "README.md").read_text()


def test_every_class_method_and_thread_on_the_page_exists() -> None:
    source = "\n".join(path.read_text() for path in (SOURCES / "engine").rglob("*.py"))
    names = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", PAGE)
    assert len(names) > 20
    for name, method in names:
        found = re.search(rf"^class {name}\b.*?(?=^\S)", source, re.M | re.S)
        is_error = re.search(rf"import .*\b{name}\b", source) is not None
        assert found or is_error, name
        assert not method or (found and f"def {method}(" in found[0]), f"{name}.{method}"
    for thread in re.findall(r"`penstock-(\w+)`", PAGE):
        assert f"penstock-{thread}" in source, thread
