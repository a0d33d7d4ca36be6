"""Sources: where `load` gets its batches from, and how far ahead.

A source is anything that yields batches, such as a Penstock Loader. `load("train.image", ...)`
takes one field of what the source called `train` yields; all fields of an iteration come from the
same batch. With `rotate` the program asks for batches ahead of their step: they are then fetched,
and copied to the device on a stream of their own, while earlier steps compute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from penstock.errors import ProgramError

__all__ = ["Source", "field_of"]


def field_of(name: str) -> tuple[str, str]:
    """Return the source and the field that a load names.

    >>> field_of("train.image"), field_of("train")
    (('train', 'image'), ('train', ''))
    """
    source, _, field = name.partition(".")
    return source, field


class Source:
    """Batches of one source, each field taken in its own time."""

    def __init__(self, name: str, batches: Iterable[Any], device: torch.device) -> None:
        self.name = name
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._device = device
        self._ahead = 0
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        """By field: how many batches it has had."""
        self._first = 0
        """The number of the oldest batch that is kept."""
        self._coming: deque[Future[dict[str, Any]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-load-{name}")
        self._stream: Any = None

    def want(self, field: str, ahead: int) -> None:
        """Take note that a field is loaded, and how many iterations ahead."""
        self._taken[field] = 0
        self._ahead = max(self._ahead, ahead)

    def next(self, field: str) -> torch.Tensor:
        """Return a field of its next batch."""
        with self._lock:
            number = self._taken[field]
            while self._first + len(self._coming) <= number + self._ahead:
                self._coming.append(self._thread.submit(self._fetch))
            coming = self._coming[number - self._first]
        batch = coming.result()
        tensor = self._field(batch, field)
        with self._lock:
            self._taken[field] = number + 1
            while self._coming and self._first < min(self._taken.values()):
                self._coming.popleft()
                self._first += 1
        if batch["event"] is not None:
            torch.cuda.current_stream(self._device).wait_event(batch["event"])
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def close(self) -> None:
        """End the thread that fetches."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch(self) -> dict[str, Any]:
        """Return the next batch, its fields on the device; the event tells when they are there."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise ProgramError(
                f"source {self.name!r} has no more batches; take as many steps as it has"
            ) from None
        fields = {f: _tensor(batch[f] if f else batch) for f in self._taken}
        if self._device.type != "cuda":
            return {"fields": fields, "event": None}
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = {f: t.to(self._device, non_blocking=True) for f, t in fields.items()}
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # The host's memory must live until the copy is over.
        return {"fields": moved, "event": event, "host": fields}

    def _field(self, batch: dict[str, Any], field: str) -> torch.Tensor:
        found: torch.Tensor = batch["fields"][field]
        return found


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
