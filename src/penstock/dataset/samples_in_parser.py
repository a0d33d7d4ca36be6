"""Samples whose bytes are parsed in another process, because parsing can crash its process.

`pack` and `verify` look at every sample of a set that a stranger may have written. The bytes are
read here and sent to a parser process together with an excerpt of the index. Decoders of the user's
own stay here: their fields come back encoded.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.dataset.bound import BoundPart
from penstock.dataset.excerpt import block_excerpt, excerpt_of
from penstock.dataset.fields import is_raw
from penstock.dataset.formats.base import Format, Sample
from penstock.dataset.formats.parser_process import is_known, packed
from penstock.dataset.parse_process import (
    ParserEndedError,
    ParserRequest,
    answer_to,
    cause_of,
    explained,
)
from penstock.dataset.parse_samples import SamplesRequest
from penstock.dataset.parse_values import unpack_value
from penstock.dataset.part import Ints, Part

_PLAIN = frozenset(
    (
        *("txt", "text", "str", "cls", "cls2", "id", "index", "count", "json", "npy"),
        *("str_int", "str_float", "str_decimal"),
        *("litdata_numpy", "litdata_tensor", "litdata_json"),
    )
)
_PLAIN_FAMILIES = ("flat:", "mds_ndarray")
"""Encodings whose decoders are Python, views of NumPy and msgspec: they raise, and nothing else."""
_NEEDS = {
    "parquet": ("pyarrow.parquet",),
    "arrow": ("pyarrow.ipc", "pyarrow.parquet"),
    "litdata": ("pyarrow.ipc", "pyarrow.parquet"),
}
_NEEDS_IMAGES = ("simplejpeg", "PIL.Image")
_DEATHS_MAX = 16
"""Parser processes that the samples of one run may end: each takes a third of a second to start."""


def reads_in_parser(bound: BoundPart, names: Iterable[str]) -> bool:
    """Return whether samples, with these fields decoded, are read in a parser process.

    They are where that runs code that can end its process, and the format can be sent to another.
    """
    can_end = _cuts_natively(bound) or _decodes_natively(bound, names)
    return can_end and _format_bytes(bound) is not None


def _cuts_natively(bound: BoundPart) -> bool:
    is_zstd = bound.part.format == "litdata" and bound.part.options.get("layout") == "samples"
    return bound.by_block or is_zstd or not is_known(_inner(bound))


def _decodes_natively(bound: BoundPart, names: Iterable[str]) -> bool:
    encodings = [bound.steps[name][0].encoding for name in own_steps(bound).intersection(names)]
    return any(e not in _PLAIN and not e.startswith(_PLAIN_FAMILIES) for e in encodings)


def own_steps(bound: BoundPart) -> frozenset[str]:
    """Return the fields that a decoder of Penstock's turns into something else than bytes."""
    steps = bound.steps.items()
    return frozenset(n for n, (_, d) in steps if n not in bound.given and not is_raw(d))


def _inner(bound: BoundPart) -> Format:
    format: Format = getattr(bound.format, "inner", bound.format)
    return format


def _format_bytes(bound: BoundPart) -> bytes | None:
    """Return a format of the user's as bytes, nothing for one of ours, None if it cannot travel."""
    return b"" if is_known(_inner(bound)) else packed(_inner(bound))


class SamplesInParser:
    """Samples with their bytes, which are parsed in another process."""

    def __init__(
        self,
        bound: BoundPart,
        excerpt: Part,
        ids: Sequence[int],
        raws: Sequence[Sequence[memoryview]],
        names: Sequence[str] = (),
    ) -> None:
        """`ids` are the excerpt's samples in the part, `raws` their bytes, or the block's.

        `names` is what they are called in errors, where that is not by number and object.
        """
        self._bound, self._ids, self._raws, self._names = bound, ids, raws, names
        self._format = _format_bytes(bound)
        self._excerpt = excerpt.as_bytes()

    @classmethod
    def alone(
        cls, bound: BoundPart, ids: Ints, raws: Sequence[Sequence[memoryview]]
    ) -> SamplesInParser:
        """Return samples that are addressed alone."""
        return cls(bound, excerpt_of(bound.part, ids), ids.tolist(), raws)

    @classmethod
    def of_block(cls, bound: BoundPart, number: int, raw: memoryview) -> SamplesInParser:
        """Return the samples of a block."""
        first, stop = bound.part.tables[0].block_starts()[number : number + 2].tolist()
        # A range, not an array: a small block may claim billions of rows of nothing.
        return cls(bound, block_excerpt(bound.part, number), range(first, stop), [[raw]])

    def samples(self, rows: Sequence[int], decoded: frozenset[str]) -> list[Sample]:
        """Return samples, some of their fields decoded; the first error is raised."""
        wanted = frozenset(f.name for f in self._bound.part.fields)
        try:
            found: list[Sample] = self._ask("samples", rows, decoded, wanted)
        except ParserEndedError as death:
            place = self._place(death)
            what = self._where(rows[place]) if place >= 0 else f"the block from {self._where(0)}"
            raise explained(death, what) from None
        return found

    def _where(self, row: int) -> str:
        return self._names[row] if self._names else self._bound.where(self._ids[row])

    def verdicts(self, rows: range) -> Iterator[tuple[int, str | Sample]]:
        """Yield rows with what is wrong with them, or with their fields that the user decodes.

        Rows that have neither are left out. A sample that ends its process has a verdict like any
        other, and the next ones are looked at by another process. A block that does so as a whole
        raises.
        """
        given = self._bound.given
        decoded = own_steps(self._bound)
        todo, num_deaths = [rows], 0
        while todo:
            some = todo.pop()
            if num_deaths >= _DEATHS_MAX:
                yield some[0], _not_looked_at(len(some))
                continue
            try:
                yield from self._ask("verdicts", some, decoded, given)
            except ParserEndedError as death:
                place = self._place(death)
                if place < 0:
                    raise explained(death, "it") from None
                num_deaths += 1
                yield some[place], cause_of(death)
                todo += [rest for rest in (some[place + 1 :], some[:place]) if rest]

    def _place(self, death: ParserEndedError) -> int:
        """Return which of the rows that were asked for ended a process; -1 for their block."""
        return death.num_begun - 2 if self._bound.by_block else max(death.num_begun - 1, 0)

    def _ask(
        self, parser: str, rows: Sequence[int], decoded: frozenset[str], wanted: frozenset[str]
    ) -> Any:
        bound = self._bound
        request = SamplesRequest(
            uri=bound.store.uri,
            numbers=_shifted(self._ids, bound.first),
            names=self._names,
            rows=rows,
            decoded=decoded,
            wanted=wanted,
        )
        raws = self._raws if bound.by_block else [self._raws[row] for row in rows]
        views = [view for raw in raws for view in raw]
        needs = _NEEDS.get(bound.part.format, ())
        if _decodes_natively(bound, decoded):
            needs += _NEEDS_IMAGES
        return unpack_value(
            answer_to(
                ParserRequest(
                    parser=parser,
                    data=[pickle.dumps((request, self._format)), self._excerpt, *views],
                    options={},
                    needs=needs,
                )
            )
        )


def _not_looked_at(count: int) -> str:
    return (
        f"{count} samples from here on were not looked at, because {_DEATHS_MAX} near them "
        "ended the process that parsed them; correct those and verify again"
    )


def _shifted(ids: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(ids, range):
        return range(ids.start + by, ids.stop + by)
    return [i + by for i in ids]
