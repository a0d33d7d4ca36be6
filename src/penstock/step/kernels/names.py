"""Identifiers for values in generated code, and code compiled from its text."""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

__all__ = ["Names", "code_of"]

_TAKEN = frozenset(
    {"torch", "triton", "tl", "inputs", "numbers", "scalars", "outs", "place", "at", "mask", "n"}
)


class Names:
    """Identifiers for values; the same names in the same order give the same identifiers."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._of: dict[str, str] = {}
        self._used = set(_TAKEN) | set(taken)

    def __call__(self, name: str) -> str:
        """Return the identifier of a value."""
        if name not in self._of:
            stem = re.sub(r"\W", "_", name)
            if not stem.isidentifier() or keyword.iskeyword(stem):
                stem = f"v_{stem}"
            found, number = stem, 1
            while found in self._used:
                number += 1
                found = f"{stem}_{number}"
            self._used.add(found)
            self._of[name] = found
        return self._of[name]


def code_of(text: str, name: str, **given: Any) -> dict[str, Any]:
    """Return the names that a text defines. Tracebacks show its lines, as if it were a file."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = f"<penstock {name} {digest}>"
    # Without a modification time linecache keeps the lines, though there is no such file.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(f"penstock_text_{digest}")
    module.__dict__.update(given)
    module.__file__ = path
    # Compilers look up the globals of a function in its module.
    sys.modules[module.__name__] = module
    exec(compile(text, path, "exec"), module.__dict__)
    return module.__dict__
