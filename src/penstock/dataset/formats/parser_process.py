"""Which bytes are parsed in a process of their own, and formats that are scanned there.

The rule is what the code that parses can do to its process. Python code, NumPy's views and msgspec
raise exceptions: tar, plain files, `.npy`, MDS, LitData and plain JSON lines are scanned in the
process of the caller, which costs nothing. Other native code can crash, take all memory or not
return, and so can code that Penstock has never seen: compressed JSON lines and formats of the
user's own are scanned apart. Parquet and Arrow read their objects here and have only the footer
and the schema parsed apart, so that many reads are in flight.

Whatever is not listed as harmless is parsed apart, and so is a new format or decoder at first.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle

from penstock.dataset.columns import parse_columns
from penstock.dataset.formats.base import Format, Options, Unit
from penstock.dataset.formats.checked import CheckedFormat
from penstock.dataset.formats.jsonl import is_packed
from penstock.dataset.parse_process import ParserEndedError, ParserRequest, answer_to, explained
from penstock.dataset.parse_values import UnsendableError, info_of, unpack_value
from penstock.dataset.part import Part, part_of
from penstock.storage.base import Buffer, ObjectInfo, Store

_KNOWN = frozenset(("tar", "files", "npy", "mds", "litdata", "jsonl", "parquet", "arrow"))
"""Formats of Penstock's that are harmless, or that have themselves parsed apart what is not."""


def is_known(format: Format) -> bool:
    """Return whether a format is one of Penstock's own and listed as harmless."""
    return type(format).__module__.startswith("penstock.") and format.name in _KNOWN


def scans_apart(format: Format, unit: Unit) -> bool:
    """Return whether the objects of a unit are scanned by code that can end its process."""
    return not is_known(format) or (format.name == "jsonl" and is_packed(unit.objects[0]))


def packed(value: Any) -> bytes | None:
    """Return a value of the caller's as another process can load it; None where it cannot."""
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception:  # Pickling runs code of the user's, which may raise anything.
        return None
    return data


class ParserProcessFormat(CheckedFormat):
    """A format whose objects are scanned in a parser process."""

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return the units of a data set."""
        found = None
        if not is_known(self.inner):
            found = self._answer("units", list(objects), store, options, store.uri)
        if found is None:
            return super().units(objects, store, options)
        return [
            Unit(objects=tuple(map(info_of, infos)), note=note)
            for infos, note in unpack_value(found)
        ]

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the samples of a unit lie."""
        where = f"{store.uri}{unit.objects[0].key}"
        found = None
        if scans_apart(self.inner, unit):
            found = self._answer("scan", unit, store, options, where)
        if found is None:
            return super().scan(unit, store, options)
        return part_of(parse_columns(memoryview(found), where), where)

    def _answer(
        self, method: str, what: Any, store: Store, options: Options, where: str
    ) -> bytes | None:
        """Return what a parser process finds; None where the format cannot be sent to one."""
        told = {"uri": store.uri, "source": store.source, "can_list": store.can_list}
        asked = {"method": method, "what": what, "options": dict(options), "store": told}
        format, question = packed(self.inner), packed(asked)
        if format is None or question is None:
            return None
        request = ParserRequest(
            parser="format",
            data=[format, question],
            options={},
            serve=partial(_serve, store),
        )
        try:
            found: bytes = answer_to(request)
        except ParserEndedError as death:
            raise explained(death, where) from None
        except UnsendableError:
            return None
        return found


def in_this_process(format: Format) -> Format:
    """Return a format that starts no process, for objects that have been scanned before."""
    return CheckedFormat(format.inner) if isinstance(format, ParserProcessFormat) else format


def _serve(store: Store, method: str, packed: bytes) -> tuple[bytes, Sequence[Buffer]]:
    """Answer a question that a format asks of its store."""
    arguments = unpack_value(packed)
    match method:
        case "info":
            return pickle.dumps(store.info(*arguments)), ()
        case "list":
            return pickle.dumps(list(store.list(*arguments))), ()
        case "read":
            return pickle.dumps(None), (store.read(*arguments),)
    assert method == "read_range", method
    info, offset, length = arguments
    return pickle.dumps(None), (store.read_range(info_of(info), offset, length),)
