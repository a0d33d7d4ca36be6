"""Sources: where `load` gets its batches from, and how far ahead.

A source is anything that yields batches, such as a Penstock Loader. `load("train.image", ...)`
takes one field of what the source called `train` yields; all fields of an iteration come from the
same batch. With `rotate` the program asks for batches ahead of their step: they are then fetched,
and copied to the device on a stream of their own, while earlier steps compute. Where groups have a
wire that loads take too (`credits`), a batch that is not urgent waits until the wire is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.step.credits import Wire
from penstock.step.streams import mark_of

__all__ = ["Source", "field_of"]


def field_of(name: str) -> tuple[str, str]:
    """Return the source and the field that a load names.

    >>> field_of("train.image"), field_of("train")
    (('train', 'image'), ('train', ''))
    """
    source, _, field = name.partition(".")
    return source, field


class Source:
    """Batches of one source; each node that loads takes them in its own time."""

    def __init__(
        self, name: str, batches: Iterable[Any], device: torch.device, over: Wire | None = None
    ) -> None:
        self.name = name
        self._over = over
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._device = device
        self._ahead = 0
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
        self._coming: deque[Future[dict[str, Any]]] = deque()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-load-{name}")
        self._stream: Any = None
        self._flying: deque[tuple[Any, dict[str, torch.Tensor]]] = deque()
        """Copies to the device, with what they read: it must live until they are over."""

    def want(self, node: str, field: str, ahead: int) -> None:
        """Take note that a node loads a field, and how many iterations ahead."""
        self._taken[node] = 0
        self._fields[node] = field
        self._ahead = max(self._ahead, ahead)

    def next(self, node: str) -> torch.Tensor:
        """Return what a node loads of its next batch."""
        with self._lock:
            number = self._taken[node]
            while self._first + len(self._coming) <= number + self._ahead:
                self._coming.append(self._thread.submit(self._fetch, mark_of(self._device)))
            coming = self._coming[number - self._first]
            self._wanted = max(self._wanted, number)
        if self._over is not None:
            self._over.look_again()
        batch = coming.result()
        tensor: torch.Tensor = batch["fields"][self._fields[node]]
        with self._lock:
            self._taken[node] = number + 1
            while self._coming and self._first < min(self._taken.values()):
                self._coming.popleft()
                self._first += 1
        if batch["event"] is not None:
            torch.cuda.current_stream(self._device).wait_event(batch["event"])
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def _is_urgent(self) -> bool:
        """Whether no batch is there beyond those that were asked for."""
        return self._num_fetched <= self._wanted + 1 or self._is_closed

    def close(self) -> None:
        """End the thread that fetches."""
        self._is_closed = True
        if self._over is not None:
            self._over.look_again()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, asked: Any) -> dict[str, Any]:
        """Return the next batch, its fields on the device; the event tells when they are there.

        The host may be many steps ahead of the device. A copy waits until the device has come to
        where the batch was asked for, or its memory would fill with batches for later steps.
        """
        if self._iterator is None:
            self._iterator = iter(self._batches)
        if self._over is not None:
            self._over.hold(self._is_urgent)
        self._num_fetched += 1
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise ProgramError(
                f"source {self.name!r} has no more batches; take as many steps as it has"
            ) from None
        fields = {f: _tensor(batch[f] if f else batch) for f in set(self._fields.values())}
        if self._device.type != "cuda":
            return {"fields": fields, "event": None}
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        asked.synchronize()
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()
        with torch.cuda.stream(self._stream):
            moved = {f: t.to(self._device, non_blocking=True) for f, t in fields.items()}
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._flying.append((event, fields))
        return {"fields": moved, "event": event}


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
