"""What members of a run know each other by: its id, and the secret that nobody else has.

A secret must not get into a log or a traceback, so whatever carries one is shown without it.
"""

from __future__ import annotations

import msgspec

RUN_BYTES = 16
SECRET_BYTES = 32


def shown(struct: msgspec.Struct) -> str:
    """Return a struct as its `repr` would be, its secret left out."""
    names = [name for name in struct.__struct_fields__ if name != "secret"]
    fields = ", ".join(f"{name}={getattr(struct, name)!r}" for name in names)
    return f"{type(struct).__name__}({fields})"
