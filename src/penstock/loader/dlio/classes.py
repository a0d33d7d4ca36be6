"""Names of classes that DLIO is told to use.

DLIO looks for `reader.data_loader_classname` and `reader.reader_classname` when it starts. Where it
finds no such class it runs its own, says nothing and returns 0. So names are checked before.
"""

from __future__ import annotations

import importlib

from penstock.errors import OptionError


def refuse_missing_class(path: str, base: type) -> None:
    """Raise unless a dotted path names a class that DLIO will use."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise OptionError(
            f"{path} is no {base.__name__}; DLIO would say nothing and run its own instead"
        )
