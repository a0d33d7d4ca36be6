"""The units and the scan of a format, carried out in a parser process.

The objects stay with the caller: the format is given a store that asks the caller's for every
range. So it reads with the caller's credentials, retries and tiers, and this process opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from penstock.dataset.formats.checked import CheckedFormat
from penstock.dataset.parse_child import ParserCall, ReadFailedError
from penstock.dataset.parse_process import error_named
from penstock.dataset.parse_values import info_values, pack_value, unpickled
from penstock.errors import MissingPackageError
from penstock.storage.base import ObjectInfo, Store


def answer_format(call: ParserCall) -> bytes:
    """Return the units of some objects, or the part of a unit, as bytes."""
    format = CheckedFormat(unpickled(call.data[0]))
    asked = unpickled(call.data[1])
    store = cast(Store, CallerStore(call, **asked["store"]))
    if asked["method"] == "scan":
        part = format.scan(asked["what"], store, asked["options"])
        return part.as_bytes()
    units = format.units(asked["what"], store, asked["options"])
    return pack_value([[[info_values(o) for o in u.objects], u.note] for u in units])


class CallerStore:
    """The caller's store, which a format can read and not write."""

    def __init__(self, call: ParserCall, *, uri: str, source: str, can_list: bool) -> None:
        self._call = call
        self.uri, self.source, self.can_list = uri, source, can_list

    def _ask(self, method: str, *arguments: Any) -> tuple[Any, memoryview]:
        head, data = self._call.ask_store(method, pack_value(arguments))
        if "error" in head:
            kind = error_named(head["error"])
            if kind is None or kind is MissingPackageError:
                raise ReadFailedError
            raise kind(head["message"])  # A format may expect it: a file that need not be there.
        return unpickled(head["said"]), data

    def info(self, key: str) -> ObjectInfo:
        """Return size and marks of an object."""
        found: ObjectInfo = self._ask("info", key)[0]
        return found

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a prefix."""
        yield from self._ask("list", prefix)[0]

    def read(self, key: str) -> memoryview:
        """Return a whole object."""
        return self._ask("read", key)[1]

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a part of an object."""
        return self._ask("read_range", info_values(info), offset, length)[1]

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with a part of an object."""
        target[:] = self.read_range(info, offset, target.nbytes)
