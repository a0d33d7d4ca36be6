"""JSON as Python's own `json` reads and writes it, at msgspec's speed.

Python writes NaN and infinities as `NaN`, `Infinity` and `-Infinity`, which are not in the standard
of JSON but in many files. What msgspec refuses is given to `json`, so these files are read too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec


def decode_json(data: memoryview | bytes) -> Any:
    """Return the value of a JSON text, or raise a `ValueError`.

    >>> decode_json(b'[NaN, -Infinity, 1]')
    [nan, -inf, 1]
    """
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError):
            raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deep for Python's stack") from None


def encode_json(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as a JSON text; numbers that are not finite as Python writes them.

    >>> encode_json({"x": [float("nan"), None]})
    b'{"x":[NaN,null]}'
    """
    text = msgspec.json.encode(value, enc_hook=enc_hook)
    if b"null" not in text:  # msgspec writes null for what is not finite.
        return text
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=enc_hook)
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()
