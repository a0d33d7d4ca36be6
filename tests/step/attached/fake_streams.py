"""Streams without a GPU: what is asked is done at once, and who waits for whom is written down.

Every operation on memory that is watched has a stream. Two operations on the same bytes, one of
which writes, must be in order by events; if they are not, a device could do them in any order, and
`Watch.races` says so. It finds what a run on a GPU would show once in a while.

Memory that comes and goes is that of the stream on which it was taken, as torch's allocator has it:
to take it and to give it back are writes of that stream, which may use it for something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.step.comms.comm import Comm

Clock = dict[int, int]


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    made = 0

    def __init__(self, device: object = None) -> None:
        Stream.made += 1
        self.number = Stream.made
        self.clock: Clock = {self.number: 0}

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        for number, count in event.clock.items():
            self.clock[number] = max(count, self.clock.get(number, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


_default = Stream()


class _Current(threading.local):
    """The streams that a thread has made current; torch keeps them for each thread, too.

    A thread that answers a rank which saves takes a stream of its own meanwhile.
    """

    def __init__(self) -> None:
        self.streams = [_default]


_current = _Current()


def current_stream(device: object = None) -> Stream:
    return _current.streams[-1]


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    _current.streams.append(stream)
    try:
        yield
    finally:
        _current.streams.pop()


@contextmanager
def faked() -> Iterator[None]:
    """Have these streams in the place of torch's."""
    with (
        mock.patch("torch.cuda.Stream", Stream),
        mock.patch("torch.cuda.current_stream", current_stream),
        mock.patch("torch.cuda.stream", on),
        mock.patch("torch.Tensor.record_stream", return_value=None),
    ):
        yield


class Watch(TorchDispatchMode):
    """Sees every operation on some tensors, and whether it is in order with those before."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.num_seen = 0
        self._watched: dict[str, torch.Tensor] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._owners: dict[int, Stream] = {}
        """Of storages that were resized: the streams on which they have their memory."""
        self._before: dict[str, list[tuple[int, int, int, int, bool, str]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._watched[name], self._spans[name] = tensor, _span(tensor)
        self._before[name] = []

    @contextmanager
    def on_memory(self) -> Iterator[None]:
        """See memory come and go."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            if size_bytes:
                made = resize(storage, size_bytes)
                self._owners[storage._cdata] = current_stream()
                self._note_memory("taken", storage)
                return made
            self._note_memory("given back", storage)
            return resize(storage, size_bytes)

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def _note_memory(self, what: str, storage: torch.UntypedStorage) -> None:
        for name, tensor in self._watched.items():
            if tensor.untyped_storage()._cdata == storage._cdata:
                if what == "taken":  # another memory than before, or in order with that
                    self._before[name], self._spans[name] = [], _span(tensor)
                with on(self._owners.setdefault(storage._cdata, current_stream())):
                    self.note(what, [], [tensor])
                if what == "given back":
                    self._spans[name] = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not func.is_view and "empty" not in func.__name__ and self._watched:
            reads, writes = [], []
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else named.get(argument.name)
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if is_written else reads).extend(_tensors(value))
            self.note(str(func), reads, writes)
        return func(*args, **named)

    def note(
        self, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Look at one operation of the current stream."""
        stream = current_stream()
        stream.clock[stream.number] += 1
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                self._touch(what, tensor, stream, is_write)

    def _touch(self, what: str, tensor: torch.Tensor, stream: Stream, is_write: bool) -> None:
        low, high = _span(tensor)
        for name, (start, stop) in self._spans.items():
            if low >= stop or high <= start:
                continue
            self.num_seen += 1
            kept = []
            for before in self._before[name]:
                a, b, number, count, wrote, other = before
                a, b = a + start, b + start
                is_apart = b <= low or a >= high or not (wrote or is_write)
                if not is_apart and stream.clock.get(number, 0) < count:
                    self.races.append(f"{name}: {what} is not after {other}")
                # Who is in order with this one is in order with those before it.
                is_stale = is_write or (number == stream.number and not wrote)
                if not (is_stale and low <= a and b <= high):
                    kept.append(before)
            # Places are counted from the start: the memory may be elsewhere the next time.
            place, count = (low - start, high - start), stream.clock[stream.number]
            mark = (*place, stream.number, count, is_write, what)
            self._before[name] = [*kept, mark]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.untyped_storage().nbytes():
        return 0, 0
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize if tensor.numel() else start


class Handle:
    """What a host begins at once, and what is there when someone waits."""

    def __init__(self, stream: Stream, inner: Any) -> None:
        self._event, self._inner = stream.record_event(), inner

    def wait(self) -> None:
        current_stream().wait_event(self._event)
        with _disable_current_modes():
            self._inner.wait()

    def then(self, work: Callable[[], None]) -> None:
        self._inner.then(work)


class StreamComm:
    """A Comm of the host in the clothes of one of a device."""

    def __init__(self, inner: Comm, watch: Watch) -> None:
        self._inner, self._watch, self._stream = inner, watch, Stream()
        self.axis, self.rank, self.size = inner.axis, inner.rank, inner.size

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, **options: Any) -> Handle:
        return self._issue("all_reduce", [], [tensor], tensor, **options)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Handle:
        return self._issue("reduce_scatter", [tensor], [out], out, tensor, **options)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Handle:
        return self._issue("all_gather", [tensor], [out], out, tensor, **options)

    def _issue(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        *tensors: torch.Tensor,
        **options: Any,
    ) -> Handle:
        self._stream.wait_stream(current_stream())
        with on(self._stream):
            self._watch.note(name, reads, writes)
        with _disable_current_modes():
            inner = getattr(self._inner, name)(*tensors, **options)
        return Handle(self._stream, inner)
