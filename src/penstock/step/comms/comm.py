"""Collectives: what the ranks of one mesh axis do together, whatever carries it.

A `Comm` belongs to one axis and one lane. Its verbs check what they are given and hand it on as one
value, a `Collective`, to `begin`: the one method that each transport has of its own. `begin`
returns a `Handle` at once. All ranks of the axis begin the same collectives in the same order;
the orders of different lanes are independent of each other.

    all_reduce       every rank ends with the sum of all
    reduce_scatter   every rank ends with its part of the sum
    all_gather       every rank has a part and ends with all of them
    all_to_all       every rank sends a run of elements to each
    reduce           the root ends with the sum; the tensors of the others may be overwritten
    broadcast        every rank ends with what the root had
    shift            along a pipeline: what rank i has arrives at rank i + by

Tensors are contiguous and treated as flat. Parts of one tensor are cut as
`penstock.step.program.layouts.part` cuts them: the last ones may be shorter, or empty. A Comm that
`takes_parts` also accepts a list of tensors, one for each rank, of any lengths.

`wire="bf16"` sends half the bytes of float32 and adds in float32: approximate, so only where
someone asked for it. `algo` is "direct" (one exchange with each rank), "ring" (neighbours only),
"native" (the library's own) or None (chosen by size). `payload_bytes` says beforehand how many
bytes each rank sends; `Comm.sent_bytes` counts them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.errors import OptionError
from penstock.step.comms.checks import (
    check_counts,
    check_list,
    check_op,
    check_part,
    check_self,
    flat,
    wire_dtype,
)
from penstock.step.program.layouts import part

__all__ = [
    "Collective",
    "Comm",
    "Done",
    "Handle",
    "HostHandle",
    "OneRankComm",
    "parts_of",
    "payload_bytes",
]

Parts = torch.Tensor | Sequence[torch.Tensor]
"""The parts of all ranks: one tensor, or a list of tensors."""


# -- handles ---------------------------------------------------------------------------------


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when its tensors can be used again, or raise what went wrong."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def then(self, work: Callable[[], None]) -> None:
        """Call something once it is done: on the thread that completes it, or now."""


class Done:
    """The handle of an operation that was complete before the call returned."""

    def wait(self) -> None:
        """Return."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def then(self, work: Callable[[], None]) -> None:
        """Call it."""
        work()


class HostHandle:
    """A handle that a thread of the host completes by calling `end`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_done = False
        # Guards _is_done and _works together: a callback added while the operation ends must be
        # called exactly once, by `end` or by `then`.
        self._lock = threading.Lock()
        self._works: list[Callable[[], None]] = []
        # Held until the end, so that waiting is acquiring it. An Event would build a Condition for
        # each operation, and there are thousands a second.
        self._gate = threading.Lock()
        self._gate.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """Wake those who wait, then call what was to follow, unless the operation failed."""
        with self._lock:
            if self._is_done:
                return  # A callback that failed may end it a second time.
            self.error, self._is_done = error, True
            works, self._works = self._works, []
        # Before the callbacks: one of them may wait for this very operation.
        self._gate.release()
        if error is None:
            for work in works:
                work()

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        with self._gate:
            error = self.error
        if error is not None:
            raise error

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done

    def then(self, work: Callable[[], None]) -> None:
        """Call something when it has ended well: on the thread that ends it, or now."""
        with self._lock:
            if not self._is_done:
                self._works.append(work)
                return
        if self.error is None:
            work()


# -- collectives -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as one rank begins it: checked, its tensors seen as rows."""

    kind: str
    """The verb of `Comm` that made it."""
    tensor: torch.Tensor | None = None
    """What this rank gives."""
    out: torch.Tensor | None = None
    """Where its result goes; None if that is the place of `tensor`, or nothing arrives."""
    apart: Sequence[torch.Tensor] | None = None
    """Parts given as a list: what a reduce_scatter reads, or where an all_gather writes."""
    op: str = ""
    """The reduction; of a shift, how far. The same on all ranks."""
    sent: torch.dtype
    """The type in which elements travel."""
    algo: str | None = None
    root: int = 0
    counts: Sequence[int] = ()
    """Elements that an all_to_all sends to each rank."""
    out_counts: Sequence[int] = ()
    """Elements that it receives from each."""
    target: int | None = None
    """The rank to which a shift sends, if there is one."""
    source: int | None = None
    """The rank from which it receives, if there is one."""

    @property
    def whole(self) -> torch.Tensor:
        """The row of which every rank has a part; of other collectives, what this rank has."""
        row = self.out if self.kind == "all_gather" or self.tensor is None else self.tensor
        assert row is not None
        return row

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the tensors."""
        rows = [*(self.apart or ()), *(row for row in (self.tensor, self.out) if row is not None)]
        return rows[0].dtype if rows else self.sent

    @property
    def length(self) -> int:
        """How many elements it is about."""
        return self.whole.numel() if self.apart is None else sum(p.numel() for p in self.apart)

    @property
    def size_bytes(self) -> int:
        """The bytes of the larger of what is given and what is received."""
        rows = [row.nbytes for row in (self.tensor, self.out) if row is not None]
        return max([*rows, sum(each.nbytes for each in self.apart or ())])

    def parts(self, size: int) -> Sequence[torch.Tensor]:
        """Return the parts of all ranks, in their order."""
        return parts_of(self.whole, size) if self.apart is None else self.apart

    def sends(self) -> dict[int, torch.Tensor]:
        """Return what this rank sends to others, by rank, of an all_to_all or a shift."""
        if self.tensor is None:
            return {}
        if self.target is not None:
            return {self.target: self.tensor}
        return dict(enumerate(torch.split(self.tensor, list(self.counts))))

    def receipts(self) -> dict[int, torch.Tensor]:
        """Return where what arrives belongs, by the rank that sends it."""
        if self.out is None:
            return {}
        if self.source is not None:
            return {self.source: self.out}
        return dict(enumerate(torch.split(self.out, list(self.out_counts))))

    def sent_bytes(self, rank: int, size: int) -> int:
        """Return what one rank sends, if it sends no byte twice."""
        if self.kind == "shift":
            is_away = self.target not in (None, rank)
            return self.whole.nbytes if is_away else 0
        if self.kind == "all_to_all":
            return (sum(self.counts) - self.counts[rank]) * self.sent.itemsize
        far = (rank - self.root) % size
        return payload_bytes(self.kind, self.length, self.sent.itemsize, size=size, rank=far)


class Comm(ABC):
    """What the ranks of one axis can do together on one lane."""

    device_type: str | None = "cpu"
    """Where tensors must live; None if that does not matter."""
    takes_parts: bool = False
    """Whether parts may be given as a list."""

    def __init__(self, axis: str, *, rank: int, size: int) -> None:
        self.axis, self.rank, self.size = axis, rank, size
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, without headers."""
        return self._sent_bytes

    @abstractmethod
    def begin(self, collective: Collective) -> Handle:
        """Begin a collective that a verb below has checked."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here and everything begun on this lane is done."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way and end the lane's thread."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Replace each rank's tensor by the sum (mean, max, min) of all."""
        row = flat("all_reduce", tensor, self.device_type)
        check_op("all_reduce", op, row)
        sent = wire_dtype("all_reduce", wire, row)
        return self.begin(Collective(kind="all_reduce", tensor=row, op=op, sent=sent, algo=algo))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensor: Parts,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`, which may be that part of the tensor."""
        mine = flat("reduce_scatter", out, self.device_type)
        check_op("reduce_scatter", op, mine)
        row, apart = self._rows("reduce_scatter", mine, tensor)
        sent = wire_dtype("reduce_scatter", wire, mine)
        return self.begin(
            Collective(
                kind="reduce_scatter",
                tensor=row,
                out=mine,
                apart=apart,
                op=op,
                sent=sent,
                algo=algo,
            )
        )

    def all_gather(
        self,
        out: Parts,
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put the parts of all ranks in `out`; the tensor may be this rank's part of it."""
        mine = flat("all_gather", tensor, self.device_type)
        row, apart = self._rows("all_gather", mine, out)
        sent = wire_dtype("all_gather", wire, mine)
        return self.begin(
            Collective(kind="all_gather", tensor=mine, out=row, apart=apart, sent=sent, algo=algo)
        )

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        out_counts: Sequence[int],
        counts: Sequence[int],
    ) -> Handle:
        """Send a run of elements to each rank; put what came from each in a row."""
        into = flat("all_to_all", out, self.device_type)
        row = flat("all_to_all", tensor, self.device_type)
        check_counts("all_to_all", into, out_counts, size=self.size)
        check_counts("all_to_all", row, counts, size=self.size)
        check_self("all_to_all", into, row, (out_counts[self.rank], counts[self.rank]))
        return self.begin(
            Collective(
                kind="all_to_all",
                tensor=row,
                out=into,
                sent=row.dtype,
                counts=counts,
                out_counts=out_counts,
            )
        )

    def reduce(
        self, tensor: torch.Tensor, *, root: int, op: str = "sum", algo: str | None = None
    ) -> Handle:
        """Put the sum of all in the root's tensor; those of others may be overwritten."""
        row = flat("reduce", tensor, self.device_type)
        check_op("reduce", op, row)
        self._check_root("reduce", root)
        return self.begin(
            Collective(kind="reduce", tensor=row, op=op, sent=row.dtype, algo=algo, root=root)
        )

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Handle:
        """Put the root's tensor in all."""
        row = flat("broadcast", tensor, self.device_type)
        self._check_root("broadcast", root)
        return self.begin(Collective(kind="broadcast", tensor=row, root=root, sent=row.dtype))

    def shift(
        self,
        out: torch.Tensor | None,
        tensor: torch.Tensor | None,
        *,
        by: int = 1,
        wrap: bool = False,
    ) -> Handle:
        """Send to the rank `by` further, receive from the one `by` before; ends are left alone."""
        source, target = self._neighbour(-by, wrap), self._neighbour(by, wrap)
        into = None if source is None else self._given(out, "out", source)
        row = None if target is None else self._given(tensor, "tensor", target)
        sent = next((one.dtype for one in (row, into) if one is not None), torch.uint8)
        op = f"by {by}{' around' * wrap}"
        return self.begin(
            Collective(
                kind="shift", tensor=row, out=into, op=op, sent=sent, target=target, source=source
            )
        )

    # -- checks ------------------------------------------------------------------------------

    def _rows(
        self, name: str, mine: torch.Tensor, parts: Parts
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor] | None]:
        """Return all parts as one row or as a list of rows, or refuse what does not fit."""
        if isinstance(parts, torch.Tensor):
            row = flat(name, parts, self.device_type)
            check_part(name, mine, row, rank=self.rank, size=self.size)
            return row, None
        assert self.takes_parts, f"{type(self).__name__} takes no lists"
        check_list(name, mine, parts, rank=self.rank, size=self.size)
        return None, [flat(name, each, self.device_type) for each in parts]

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise OptionError(
                f"{name}: root {root} of an axis with {self.size} ranks; ranks of axis "
                f"{self.axis!r} are counted from 0"
            )

    def _neighbour(self, by: int, wrap: bool) -> int | None:
        other = self.rank + by
        if wrap:
            return other % self.size
        return other if 0 <= other < self.size else None

    def _given(self, tensor: torch.Tensor | None, name: str, peer: int) -> torch.Tensor:
        if tensor is None:
            raise OptionError(f"shift: there is a rank {peer}, so {name} is needed; give a tensor")
        return flat("shift", tensor, self.device_type)


class OneRankComm(Comm):
    """The Comm of an axis with one rank: everything is a copy, and nothing is sent."""

    device_type = None

    def __init__(self, axis: str) -> None:
        super().__init__(axis, rank=0, size=1)

    def begin(self, collective: Collective) -> Handle:
        """Copy what has another place, if it is not there already."""
        out, tensor = collective.out, collective.tensor
        if out is not None and tensor is not None and out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return Done()

    def barrier(self) -> None:
        """Return."""

    def close(self) -> None:
        """Return."""


# -- parts -----------------------------------------------------------------------------------


def parts_of(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return the parts of a flat tensor as views, by rank."""
    row = tensor if tensor.dim() == 1 else tensor.view(-1)
    parts = list(torch.chunk(row, size))  # one call for all; it leaves empty ones out
    if len(parts) < size:
        parts += [row[row.numel() :]] * (size - len(parts))
    return parts


def payload_bytes(
    kind: str, length: int, item_bytes: int, *, size: int, rank: int, algo: str = "direct"
) -> int:
    """Return what one rank sends for a collective over `length` elements in all.

    Summed over ranks it is the same for "direct" and "ring"; one rank's share of it differs only
    where parts are uneven. For `reduce` and `broadcast` the rank is counted from the root.

    >>> [payload_bytes("reduce_scatter", 10, 4, size=4, rank=r) for r in range(4)]
    [28, 28, 28, 36]
    """
    lengths = [stop - start for start, stop in (part(length, size, i) for i in range(size))]
    scatter = length - lengths[rank]
    gather = (size - 1) * lengths[rank]
    if algo == "ring":  # a ring passes on every part but the one its neighbour began with
        gather = length - lengths[(rank + 1) % size]
    elements = {
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_reduce": scatter + gather,
        "reduce": length if rank != 0 else 0,
        "broadcast": length if (rank + 1) % size != 0 else 0,
    }
    return elements[kind] * item_bytes if size > 1 else 0
