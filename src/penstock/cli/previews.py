"""Short descriptions of the values of samples. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.cli.screen import cut
from penstock.units import show_bytes

_ITEMS_MAX = 4


def preview(value: Any, width: int = 60) -> str:
    """Return a value as a person would describe it.

    >>> preview(np.zeros((96, 96, 3), np.uint8)), preview("a\\ncat"), preview(7), preview(b"abc")
    ('image 96×96, RGB', '"a cat"', '7', '3 B of bytes')
    """
    if value is None:
        return "–"
    if isinstance(value, np.ndarray) and value.ndim:
        return cut(_array(value), width)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{show_bytes(len(value))} of bytes"
    if isinstance(value, str):
        return cut(f'"{one_line(value)}', width - 1) + '"'
    if isinstance(value, dict):
        inside = ", ".join(f"{one_line(str(k))}: {preview(v, width)}" for k, v in value.items())
        return cut("{" + inside + "}", width)
    if isinstance(value, float):
        return f"{value:.6g}"
    return cut(one_line(str(value)), width)


def one_line(text: str) -> str:
    """Return a text without line breaks and without control sequences of terminals.

    >>> one_line("a\\n  cat"), one_line("\\x1b[2J gone")
    ('a cat', '[2J gone')
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _array(value: np.ndarray[Any, Any]) -> str:
    shape = "×".join(map(str, value.shape))
    if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3:
        return f"image {value.shape[1]}×{value.shape[0]}, RGB"
    if value.ndim == 1:
        start = ", ".join(f"{v:.4g}" if value.dtype.kind == "f" else str(v)
                          for v in value[:_ITEMS_MAX])  # fmt: skip
        return f"{value.dtype} {shape}: {start}{', …' if len(value) > _ITEMS_MAX else ''}"
    return f"{value.dtype} {shape}"
