"""Memory of batches that a GPU reads: page-locked once, and not used again while a copy runs.

From page-locked memory `tensor.to("cuda", non_blocking=True)` returns before the copy is done. If
the batch is dropped right after, its memory must not be filled with the next one yet. Such copies
cannot be observed. So when a batch is dropped, an event is recorded on every busy stream of torch,
and the memory is held back until all these events have happened. Streams of other libraries are
unknown here: code that copies on one of those must keep the batch until the copy is done.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

_cuda: Any = torch.cuda
"""`Any`, because most of the module has no types."""
_STREAMS_IN_A_POOL = 32
"""Streams that torch hands out in turn, for each device and priority."""

_log = logging.getLogger("penstock.loader")

Release = tuple[int, int]


class PinnedMemory:
    """Page-locks segments, and holds back memory that a GPU may still read."""

    def __init__(self) -> None:
        self._pools: dict[int, list[Any]] = {}
        """All streams that torch may hand out, by device."""
        self._held: deque[tuple[list[Any], list[Release]]] = deque()
        """Memory that is held back, with the events that must happen first."""
        self._is_refused = False

    def lock(self, memory: Any, address: int, size_bytes: int) -> None:
        """Page-lock some memory for as long as it is mapped."""
        if self._is_refused:
            return
        cudart: Any = _cuda.cudart()
        code = int(cudart.cudaHostRegister(address, size_bytes, 0))
        if code:
            self._is_refused = True
            _log.warning(
                "batches are not page-locked, so copies to the GPU are slower: CUDA refuses %d "
                "bytes with error %d",
                size_bytes,
                code,
            )
            return
        # The latest finalizer runs first, so this comes before the memory is unmapped.
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False

    def free(self, dropped: Iterable[Release]) -> list[Release]:
        """Hold back memory that was dropped; return memory that can be used again."""
        if _cuda.is_current_stream_capturing():
            # While a graph is recorded, streams must not be queried. None: events to be made later.
            self._held.append(([None], list(dropped)))
            return []
        dropped = list(dropped)
        if dropped:
            self._held.append((self._events(), dropped))
        out: list[Release] = []
        while self._held:
            events, some = self._held[0]
            if None in events:
                events = self._events()
                self._held[0] = events, some
            if not all(event.query() for event in events):
                break
            out += some
            self._held.popleft()
        return out

    def _events(self) -> list[Any]:
        """Return an event for each stream that has something left to do."""
        out = []
        for device in range(_cuda.device_count()):
            if not torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
                continue
            streams = [_cuda.current_stream(device), _cuda.default_stream(device)]
            for stream in {s.cuda_stream: s for s in [*streams, *self._pool(device)]}.values():
                if not stream.query():
                    event = _cuda.Event()
                    event.record(stream)
                    out.append(event)
        return out

    def _pool(self, device: int) -> list[Any]:
        if device not in self._pools:
            low, high = _cuda.Stream.priority_range()
            self._pools[device] = [
                _cuda.Stream(device, priority=priority)
                for priority in range(high, low + 1)
                for _ in range(_STREAMS_IN_A_POOL)
            ]
        return self._pools[device]


def pinned_memory() -> PinnedMemory | None:
    """Return a `PinnedMemory` once this process uses a GPU."""
    return PinnedMemory() if _cuda.is_initialized() else None
