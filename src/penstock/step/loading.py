"""Sources: where `load` gets its batches from, in which stages, and how far ahead.

A source is anything that yields batches. `load("train.image", ...)` takes one field of what the
source called `train` yields; all fields of an iteration come from the same batch. With `rotate` the
program asks for batches ahead of their step, and their stages go on while earlier steps compute:

    fetch    the bytes of a batch come; where groups have a wire that loads take too (`credits`), a
             batch that is not urgent waits until the wire is free, and nothing else does
    decode   they become a batch, where the source tells the two apart
    copy     it goes to the device, on a stream of its own, where values do not live on the host

Each stage of a source has a thread, so one batch is copied while the next is decoded and the one
after it fetched. A source tells fetching and decoding apart if it has `stages(only_asked=...)`, as
a Penstock Loader does: what that returns has `fetch()`, which returns something when the bytes are
here, `decode(something)`, which returns the batch, and `close()`. Anything else is iterated over,
and what it does counts as fetching.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import ProgramError
from penstock.step.credits import Wire
from penstock.step.streams import mark_of

__all__ = ["Landing", "Source", "Spent", "Stages", "field_of", "stages_offered"]

_SPENT_MAX = 1024
"""Stages of batches whose times are kept until somebody asks."""


class Stages(Protocol):
    """Batches of a source in two stages, each called in order, by a thread of its own."""

    def fetch(self) -> Any:
        """Return something when the bytes of the next batch are here; StopIteration at the end."""

    def decode(self, fetched: Any) -> Any:
        """Return the batch."""

    def close(self) -> None:
        """End what was begun; a call under way returns or raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """When one stage of one batch was at work (perf_counter)."""

    stage: str
    number: int
    """Of the batch, from 0."""
    start_s: float
    stop_s: float


class Landing:
    """A stage of a batch under way, as lanes want it."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when it is over, or raise what went wrong."""
        self._future.result()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def then(self, work: Callable[[], None]) -> None:
        """Have something called once it is over, well or not."""
        self._future.add_done_callback(lambda _: work())


def field_of(name: str) -> tuple[str, str]:
    """Return the source and the field that a load names.

    >>> field_of("train.image"), field_of("train")
    (('train', 'image'), ('train', ''))
    """
    source, _, field = name.partition(".")
    return source, field


def stages_offered(batches: Iterable[Any], device: torch.device) -> tuple[str, ...]:
    """Return what a batch of a source goes through; nothing where it is there in one go."""
    found = ["fetch"]
    if hasattr(batches, "stages"):
        found.append("decode")
    if device.type != "cpu":
        found.append("copy")
    return tuple(found) if len(found) > 1 else ()


class Source:
    """Batches of one source; each node that loads takes them in its own time."""

    def __init__(
        self, name: str, batches: Iterable[Any], device: torch.device, over: Wire | None = None
    ) -> None:
        self.name = name
        self._over = over
        self._batches = batches
        self._begun: Stages | None = None
        self._device = device
        self._stages = stages_offered(batches, device) or ("load",)
        self._ahead = 0
        self._goes_first = False
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        """By the node that loads: how many batches it has had."""
        self._fields: dict[str, str] = {}
        """By the node that loads."""
        self._first = 0
        """The number of the oldest batch that is kept."""
        self._num_fetched = 0
        self._wanted = -1
        """The newest batch that somebody has asked for."""
        self._coming: deque[dict[str, Future[Any]]] = deque()
        """By stage, of the batches that are kept."""
        self._is_closed = False
        self._threads = {
            stage: ThreadPoolExecutor(1, thread_name_prefix=f"penstock-{stage}-{name}")
            for stage in self._stages
        }
        self._stream: Any = None
        self._spent: deque[Spent] = deque(maxlen=_SPENT_MAX)

    def want(self, node: str, field: str, ahead: int, *, goes_first: bool = False) -> None:
        """Take note that a node loads a field, how many iterations ahead, and before whom."""
        self._taken[node] = 0
        self._fields[node] = field
        self._ahead = max(self._ahead, ahead)
        self._goes_first = self._goes_first or goes_first

    def ask(self, node: str) -> None:
        """Have the next batch of a node brought here, and those that are to be ahead of it."""
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
        if batch["event"] is not None:
            torch.cuda.current_stream(self._device).wait_event(batch["event"])
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def spent(self) -> list[tuple[Spent, int]]:
        """Return when stages were at work since this was last asked, and how far ahead of use."""
        out = []
        now = max(self._taken.values(), default=0) - 1
        while self._spent:
            with suppress(IndexError):
                one = self._spent.popleft()
                out.append((one, max(0, one.number - now)))
        return out

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        if self._over is not None:
            self._over.look_again()
        if self._begun is not None:
            self._begun.close()
        # From the first stage on: whoever waits for a batch of the stage before is then told.
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)

    # -- stages --------------------------------------------------------------------------------

    def _begin(self, number: int) -> dict[str, Future[Any]]:
        """Have a batch go through its stages."""
        asked = mark_of(self._device)
        out: dict[str, Future[Any]] = {}
        before: Future[Any] | None = None
        for stage, thread in self._threads.items():
            if before is None:
                before = thread.submit(self._fetch, number)
            elif stage == "decode":
                before = thread.submit(self._decode, number, before)
            else:
                before = thread.submit(self._copy, number, before, asked)
            out[stage] = before
        return out

    def _is_urgent(self) -> bool:
        """Whether no batch is there beyond those that were asked for."""
        return self._num_fetched <= self._wanted + 1 or self._is_closed

    def _fetch(self, number: int) -> Any:
        """Return a batch, or what it is to be decoded from."""
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

    def _opened(self) -> Stages:
        if "decode" in self._stages:
            # Over a wire of others, nothing may come that was not asked for.
            stages: Stages = self._batches.stages(only_asked=self._over is not None)  # type: ignore[attr-defined]
            return stages
        return _Plain(iter(self._batches))

    def _decode(self, number: int, before: Future[Any]) -> dict[str, Any]:
        fetched = before.result()
        assert self._begun is not None
        start_s = time.perf_counter()
        batch = self._batch(self._begun.decode(fetched))
        self._note("decode", number, getattr(fetched, "decode_ns", None), start_s)
        return batch

    def _batch(self, batch: Any) -> dict[str, Any]:
        fields = {f: _tensor(batch[f] if f else batch) for f in set(self._fields.values())}
        return {"fields": fields, "event": None}

    def _copy(self, number: int, before: Future[Any], asked: Any) -> dict[str, Any]:
        """Return a batch on the device; the event tells when it is there.

        The host may be many steps ahead of the device. A copy waits until the device has come to
        where the batch was asked for, or its memory would fill with batches for later steps.
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
        with suppress(RuntimeError):  # Closed meanwhile.
            self._threads["copy"].submit(self._landed, number, event, fields, start_s)
        return {"fields": moved, "event": event}

    def _landed(self, number: int, event: Any, fields: Any, start_s: float) -> None:
        """Keep what a copy reads until it is over, and take note when that was."""
        event.synchronize()
        self._note("copy", number, None, start_s)

    def _note(
        self, stage: str, number: int, told_ns: tuple[int, int] | None, start_s: float
    ) -> None:
        """Take note when a stage was at work: as its source tells, or while it was waited for."""
        stop_s = time.perf_counter()
        if told_ns is not None:
            start_s, stop_s = told_ns[0] / 1e9, told_ns[1] / 1e9
        if stop_s > start_s:
            self._spent.append(Spent(stage=stage, number=number, start_s=start_s, stop_s=stop_s))


class _Plain:
    """What has no stages: all that it does counts as fetching."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def fetch(self) -> Any:
        return next(self._batches)

    def decode(self, fetched: Any) -> Any:
        return fetched

    def close(self) -> None:
        """It is not ours to close."""


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
