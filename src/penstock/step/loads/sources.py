"""Sources: where `load` gets its batches from, in which stages, and how far ahead.

A source is any iterable of batches. `load("train.image", ...)` takes one field of the batches of
the source called `train`; all fields of an iteration come from the same batch. With `rotate` the
program asks for batches ahead of their step, and their stages run while earlier steps compute:

    fetch    reads the bytes of a batch; if the groups share a wire with loads (`shared_wire`), a
             batch that is not urgent waits here until the wire is free
    decode   makes a batch of them, if the source separates the two
    copy     copies it to the device, on a stream of its own, if values do not live on the host

Each stage of a source has a thread, so one batch is copied while the next is decoded and the one
after it fetched. A source separates fetching from decoding if it has `stages(only_asked=...)`, as a
Penstock Loader has: it returns an object with `fetch()`, which returns something when the bytes are
here, `decode(something)`, which returns the batch, and `close()`. If that object has `used()`, it
is called when a step has taken a batch, so that the state of a Loader counts batches that steps
have used and not those ahead of them. Any other source is iterated over, and all its work counts as
fetching. It may reuse the memory of a batch for the next one: if batches are ahead, or a step
returns what it loads, they are copied. Fields of a tuple or a list are named by their position, as
in `load("train.0", ...)`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import ProgramError
from penstock.step.loads.shared_wire import Wire
from penstock.step.loads.threads import Worker
from penstock.step.streams import mark_of

__all__ = [
    "StageHandle",
    "Source",
    "StageTime",
    "SourceStages",
    "check_apart",
    "field_of",
    "stages_offered",
]

_SPENT_MAX = 1024
"""Stages of batches whose times are kept until `spent` returns them."""
_JOIN_S = 5.0
"""How long `close` waits for a source that is at work."""


class SourceStages(Protocol):
    """Batches of a source in two stages, each called in order, on a thread of its own."""

    def fetch(self) -> Any:
        """Return something when the bytes of the next batch are here; StopIteration at the end."""

    def decode(self, fetched: Any) -> Any:
        """Return the batch."""

    def close(self) -> None:
        """End what was begun; a call under way returns or raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """When one stage of one batch was at work (perf_counter)."""

    stage: str
    number: int
    """Of the batch, from 0."""
    start_s: float
    stop_s: float


class StageHandle:
    """A stage of a batch under way, as a handle for a lane."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when it is over, or raise what went wrong."""
        self._future.result()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def then(self, work: Callable[[], None]) -> None:
        """Call something once it is over, well or not."""
        self._future.add_done_callback(lambda _: work())


def field_of(name: str) -> tuple[str, str]:
    """Return the source and the field that a load names.

    >>> field_of("train.image"), field_of("train")
    (('train', 'image'), ('train', ''))
    """
    source, _, field = name.partition(".")
    return source, field


def stages_offered(batches: Iterable[Any], device: torch.device) -> tuple[str, ...]:
    """Return the stages of a source's batches; none if it has only one."""
    if isinstance(batches, Source):
        return batches.offered
    found = ["fetch"]
    if hasattr(batches, "stages"):
        found.append("decode")
    if device.type != "cpu":
        found.append("copy")
    return tuple(found) if len(found) > 1 else ()


def check_apart(sources: Mapping[str, Any]) -> None:
    """Refuse an iterator given as two sources: each of its batches would reach only one."""
    names: dict[int, str] = {}
    for name, of in sources.items():
        first = names.setdefault(id(of), name)
        if first != name and (hasattr(of, "stages") or hasattr(of, "__next__")):
            raise ProgramError(
                f"sources {first!r} and {name!r} are one {type(of).__name__}, of which each batch "
                f"comes once; load fields of one source, as {first}.x and {first}.y, or give each "
                "its own"
            )


class Source:
    """Batches of one source; each node that loads takes them at its own time."""

    def __init__(
        self, name: str, batches: Iterable[Any], device: torch.device, over: Wire | None = None
    ) -> None:
        self.name = name
        self._over = over
        self._batches = batches
        self._begun: SourceStages | None = None
        self._device = device
        self.offered = stages_offered(batches, device)
        self._stages = self.offered or ("load",)
        self._ahead = 0
        self._goes_first = False
        self._is_lasting = False
        """Whether a batch may still be in use when the source makes the next one."""
        # Guards the counts below and `_coming`: the threads of lanes ask for batches, those of
        # several nodes take them.
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        """How many batches each node has taken."""
        self._fields: dict[str, str] = {}
        """The field that each node loads."""
        self._known: set[str] = set()
        """Fields that nodes load, or have loaded."""
        self._first = 0
        """The number of the oldest batch that is kept."""
        self._num_fetched = 0
        self._wanted = -1
        """The newest batch that a node has asked for."""
        self._coming: deque[dict[str, Future[Any]]] = deque()
        """The stages of each batch that is kept."""
        self._is_closed = False
        self._threads = {stage: Worker(f"penstock-{stage}-{name}") for stage in self._stages}
        self._stream: Any = None
        self._last_copy: Future[Any] | None = None
        self._spent: deque[StageTime] = deque(maxlen=_SPENT_MAX)

    def want(
        self,
        node: str,
        field: str,
        ahead: int,
        *,
        goes_first: bool = False,
        is_returned: bool = False,
    ) -> None:
        """Note that a node loads a field, and how many iterations ahead.

        Args:
            node: its name.
            field: of each batch.
            ahead: for how many later iterations batches are asked for.
            goes_first: whether the wire must not hold it back.
            is_returned: whether a step returns the batch.
        """
        if self._coming and field not in self._known:
            raise ProgramError(
                f"batches of source {self.name!r} have been loaded without {field!r}"
            )
        self._known.add(field)
        self._taken[node] = self._first
        self._fields[node] = field
        self._ahead = max(self._ahead, ahead)
        self._goes_first = self._goes_first or goes_first
        self._is_lasting = self._is_lasting or ahead > 0 or is_returned

    def handed_on(self) -> Source:
        """Forget the nodes that load: those of another step go on with the batch that is next."""
        with self._lock:
            self._taken.clear()
            self._fields.clear()
            self._ahead, self._goes_first = 0, False
        return self

    def looked_at(self) -> tuple[Any, float]:
        """Return the batch that is next, without taking it, and how long its longest stage took."""
        on_host = [stage for stage in self._stages if stage != "copy"][-1]
        with self._lock:
            self._is_lasting = True  # Later batches may be asked for before it is taken.
            if not self._coming:
                self._coming.append(self._begin(self._first))
            coming = self._coming[0]
        fields = coming[on_host].result()["fields"]
        spent = [one for one in list(self._spent) if one.number >= self._first]
        took_s = [one.stop_s - one.start_s for one in spent]
        return fields.get("", fields), max(took_s, default=0.0)

    def ask(self, node: str) -> None:
        """Begin to load the next batch of a node, and those that are to be ahead of it."""
        with self._lock:
            number = self._taken[node]
            while self._first + len(self._coming) <= number + self._ahead:
                self._coming.append(self._begin(self._first + len(self._coming)))
            self._wanted = max(self._wanted, number)
        if self._over is not None:
            self._over.look_again()

    def stage(self, node: str, stage: str) -> Future[Any]:
        """Return one stage of the batch that a node has asked for."""
        with self._lock:
            return self._coming[self._taken[node] - self._first][stage]

    def take(self, node: str) -> torch.Tensor:
        """Return what a node loads of the batch that it has asked for."""
        batch = self.stage(node, self._stages[-1]).result()
        tensor: torch.Tensor = batch["fields"][self._fields[node]]
        with self._lock:
            self._taken[node] += 1
            while self._coming and self._first < min(self._taken.values()):
                self._coming.popleft()
                self._first += 1
                self._used()
        if batch["event"] is not None:
            torch.cuda.current_stream(self._device).wait_event(batch["event"])
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def spent(self) -> list[tuple[StageTime, int]]:
        """Return when stages were at work since the last call, and how far ahead of use."""
        out = []
        now = max(self._taken.values(), default=0) - 1
        while self._spent:
            with suppress(IndexError):
                one = self._spent.popleft()
                out.append((one, max(0, one.number - now)))
        return out

    def close(self) -> None:
        """End the threads; wait a few seconds for a batch that the source is at work on."""
        self._is_closed = True
        if self._over is not None:
            self._over.look_again()
        if self._begun is not None:
            self._begun.close()
        # From the first stage on: a stage that waits for the one before it is then woken by the
        # cancelled future.
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads.values():
            thread.close()
        left = [s for s, thread in self._threads.items() if not thread.ends_by(until_s)]
        if left:
            warnings.warn(
                f"source {self.name!r} is still in {left[0]} {_JOIN_S:g} s after its step was "
                "closed: it waits for a batch that is not needed any more; its thread ends when "
                "that comes, or with the process",
                stacklevel=2,
            )
        else:
            # Free the memory of batches that were ahead, and the processes of an iterator.
            self._batches, self._begun, self._last_copy = (), None, None
            self._coming.clear()

    # -- stages --------------------------------------------------------------------------------

    def _begin(self, number: int) -> dict[str, Future[Any]]:
        """Start a batch on its stages."""
        asked = mark_of(self._device)
        out: dict[str, Future[Any]] = {}
        before: Future[Any] | None = None
        for stage, thread in self._threads.items():
            if before is None:
                before = thread.submit(self._fetch, number, self._last_copy)
            elif stage == "decode":
                before = thread.submit(self._decode, number, before)
            else:
                before = self._last_copy = thread.submit(self._copy, number, before, asked)
            out[stage] = before
        return out

    def _is_urgent(self) -> bool:
        """Whether no batch is ready beyond those that nodes have asked for."""
        return self._num_fetched <= self._wanted + 1 or self._is_closed

    def _fetch(self, number: int, copy: Future[Any] | None) -> Any:
        """Return a batch, or what it is decoded from.

        A plain source may reuse its memory, so the copy before must have finished reading it.
        """
        if copy is not None and "decode" not in self._stages:
            copy.result()["event"].synchronize()
        if self._begun is None:
            self._begun = self._opened()
        if self._over is not None and not self._goes_first:
            self._over.hold(self._is_urgent)
        if self._is_closed:
            raise ProgramError(f"source {self.name!r} is closed")
        self._num_fetched += 1
        start_s = time.perf_counter()
        try:
            fetched = self._begun.fetch()
        except StopIteration:
            raise ProgramError(
                f"source {self.name!r} has no more batches; take as many steps as it has"
            ) from None
        made = fetched if "decode" in self._stages else self._batch(fetched)
        self._note(self._stages[0], number, getattr(fetched, "fetch_ns", None), start_s)
        return made

    def _opened(self) -> SourceStages:
        if "decode" in self._stages:
            # On a shared wire, a batch that was not asked for must not be fetched.
            stages: SourceStages = self._batches.stages(only_asked=self._over is not None)  # type: ignore[attr-defined]
            return stages
        if not any(hasattr(self._batches, name) for name in ("__iter__", "__getitem__")):
            raise ProgramError(
                f"source {self.name!r} is a {type(self._batches).__name__}; give something that "
                "yields batches, such as a Loader, a list or a generator"
            )
        return _Plain(iter(self._batches))

    def _used(self) -> None:
        """Tell a source that has `used()` that all nodes have taken its oldest batch."""
        used = getattr(self._begun, "used", None)
        if used is not None:
            used()

    def _decode(self, number: int, before: Future[Any]) -> dict[str, Any]:
        fetched = before.result()
        assert self._begun is not None
        start_s = time.perf_counter()
        try:
            decoded = self._begun.decode(fetched)
        except StopIteration:
            raise ProgramError(
                f"source {self.name!r} has ended in decode, before a batch that it has fetched"
            ) from None
        batch = self._batch(decoded)
        self._note("decode", number, getattr(fetched, "decode_ns", None), start_s)
        return batch

    def _batch(self, batch: Any) -> dict[str, Any]:
        fields = {f: self._tensor(batch, f) for f in self._known}
        return {"fields": fields, "event": None}

    def _tensor(self, batch: Any, field: str) -> torch.Tensor:
        """Return a field of a batch, copied if the source may reuse its memory too early."""
        try:
            is_row = isinstance(batch, tuple | list) and field.isdecimal()
            value = (batch[int(field)] if is_row else batch[field]) if field else batch
        except (LookupError, TypeError, ValueError) as error:
            has = f"without names; yield a dict with {field!r} in it"
            if isinstance(batch, Mapping):
                has = f"with {', '.join(map(str, batch))}; name one of them"
            elif isinstance(batch, tuple | list):
                has = (
                    f"of {len(batch)} without names; load {self.name}.0 and so on, or yield a dict "
                    f"with {field!r} in it"
                )
            raise ProgramError(
                f"load of {self.name}.{field}: a batch of source {self.name!r} is a "
                f"{type(batch).__name__} {has}"
            ) from error
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            name = f"{self.name}.{field}" if field else self.name
            raise ProgramError(
                f"load of {name}: no tensor can be made of the {type(value).__name__} that source "
                f"{self.name!r} yields ({error}); yield arrays or tensors"
            ) from error
        is_lent = self._is_lasting and len(self._stages) == 1
        return tensor.clone() if is_lent else tensor

    def _copy(self, number: int, before: Future[Any], asked: Any) -> dict[str, Any]:
        """Return a batch on the device, and the event at the end of its copy.

        The host may be many steps ahead of the device. A copy waits until the device has reached
        the point where the batch was asked for; otherwise device memory would fill with batches for
        later steps.
        """
        fields = before.result()["fields"]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        asked.synchronize()
        start_s = time.perf_counter()
        with torch.cuda.stream(self._stream):
            moved = {f: t.to(self._device, non_blocking=True) for f, t in fields.items()}
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        with suppress(RuntimeError):  # The thread was closed meanwhile.
            self._threads["copy"].submit(self._landed, number, event, fields, start_s)
        return {"fields": moved, "event": event}

    def _landed(self, number: int, event: Any, fields: Any, start_s: float) -> None:
        """Hold the memory that a copy reads until it is over, and note when that was."""
        event.synchronize()
        self._note("copy", number, None, start_s)

    def _note(
        self, stage: str, number: int, told_ns: tuple[int, int] | None, start_s: float
    ) -> None:
        """Note when a stage was at work: as the source says, or else as long as we waited."""
        stop_s = time.perf_counter()
        if told_ns is not None:
            start_s, stop_s = told_ns[0] / 1e9, told_ns[1] / 1e9
        if stop_s > start_s:
            self._spent.append(
                StageTime(stage=stage, number=number, start_s=start_s, stop_s=stop_s)
            )


class _Plain:
    """A source without stages: all its work counts as fetching."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def fetch(self) -> Any:
        return next(self._batches)

    def decode(self, fetched: Any) -> Any:
        return fetched

    def close(self) -> None:
        """Leave the iterator to its owner."""
