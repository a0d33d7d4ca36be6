"""Sizes of a run's id and of its secret, which only its members know.

A secret must not get into a log or a traceback, so structs that hold one leave it out of `repr`.
"""

from __future__ import annotations

import msgspec

RUN_BYTES = 16
SECRET_BYTES = 32


def shown(struct: msgspec.Struct) -> str:
    """Return the usual `repr` of a struct without its secret."""
    names = [name for name in struct.__struct_fields__ if name != "secret"]
    fields = ", ".join(f"{name}={getattr(struct, name)!r}" for name in names)
    return f"{type(struct).__name__}({fields})"
