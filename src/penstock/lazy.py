"""Names of a package that are imported when they are first used (PEP 562).

A package that imports all its names makes each process pay for all of them. Engine and workers use
few, and the first batch waits until they have imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(
    module: str, modules: Mapping[str, str], *, package: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module; `modules` says where each name lies.

    They lie in `package`, which is the module itself unless it says otherwise. Modules of the
    package are found as well, whether somebody has imported them or not.
    """
    names = vars(sys.modules[module])
    package = package or module

    def get(name: str) -> Any:
        if name in modules:
            # Kept, so that the next use finds it without this function.
            names[name] = value = getattr(import_module(f"{package}.{modules[name]}"), name)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get, lambda: sorted({*names, *modules})
