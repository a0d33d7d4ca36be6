"""A wire that loads and communication share, and which of them may use it when.

Batches that come over the network use the same link as gradients. TCP divides a full link among
connections, so a loader with eight requests leaves a gradient a ninth of it, and it is the gradient
that the step waits for. A load has time: it is needed an iteration later.

    wire = Wire()
    with Groups(mesh(dp=2), over=wire) as groups:          # communication is seen by the wire
        attach(model, optimizer, groups)
        for batch in wire.ahead(loader):                   # loads begin when it has time
            ...

The rule: the next load is held back while communication is under way *and* a batch is ready that
nobody has taken yet. It starts as soon as the wire is free, or when the last batch has been taken:
then it is urgent, so a wire that is never free starves no load. A load that has begun is never
stopped, so it should be no more than a batch: a `Loader` given to `ahead` is made with `look_ahead`
of one and then asks for a batch when one is taken from it. Its state counts batches that were taken
here, not those that are ahead.

Loads of a compiled step follow the same rule if its groups have a wire and they are `rotate`d by
two or more. Only their fetching is held back, and a `Loader` then reads what the step asks for and
nothing else. A load whose `priority` is below that of every move is not held back.

It pays if a step also waits for computation: loads then use the wire meanwhile. If a step waits for
the wire alone, every gap counts, and a load that gives way leaves some of them empty: do without it
there. The wire knows the communication of this process only, and communication that waits for a
late rank counts as under way.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

from penstock.errors import OptionError
from penstock.step.comms.comm import Collective, Comm, Handle

__all__ = ["BatchesAhead", "WatchedComm", "Wire"]

_LOOK_S = 0.05
"""How often to check for communication that has failed: its handle calls nobody back."""
_SMALL_BYTES = 64 << 10
"""Less than this is over before a load could have given way to it."""
_JOIN_S = 5.0
"""How long `close` waits for a batch that is being taken."""

T = TypeVar("T")


class Wire:
    """Counts communication under way, and lets loads wait for the end of it."""

    def __init__(self) -> None:
        # Guards `_flying`. Notified when the wire is free, or a load may have become urgent.
        self._changed = threading.Condition()
        self._flying: set[Handle] = set()
        self.num_held = 0
        """Loads that had to wait."""
        self.num_urgent = 0
        """Those of them that became urgent before the wire was free."""

    @property
    def is_busy(self) -> bool:
        """Whether communication is under way."""
        with self._changed:
            return bool(self._flying)

    def begun(self, handle: Handle, size_bytes: int) -> Handle:
        """Note communication that has begun, and return it."""
        if size_bytes >= _SMALL_BYTES and not handle.is_done():
            # Before `then`, which may call `_over` at once.
            with self._changed:
                self._flying.add(handle)
            handle.then(lambda: self._over(handle))
        return handle

    def _over(self, handle: Handle) -> None:
        with self._changed:
            self._flying.discard(handle)
            if not self._flying:
                self._changed.notify_all()

    def hold(self, is_urgent: Callable[[], bool]) -> None:
        """Return when the wire is free or the load has become urgent.

        The thread that makes it urgent calls `look_again`.
        """
        with self._changed:
            if not self._flying or is_urgent():
                return
            self.num_held += 1
            while self._flying:
                if is_urgent():
                    self.num_urgent += 1
                    return
                if not self._changed.wait(_LOOK_S):
                    # Failed communication is done, but nobody has called `_over`.
                    self._flying = {handle for handle in self._flying if not handle.is_done()}

    def look_again(self) -> None:
        """Wake loads that are held, to ask again whether they are urgent."""
        with self._changed:
            self._changed.notify_all()

    def ahead(self, batches: Iterable[T], *, batches_ahead: int = 2) -> BatchesAhead[T]:
        """Return an iterator of the same batches, taken ahead of use when the wire is free."""
        return BatchesAhead(batches, self, depth=batches_ahead)


class BatchesAhead(Generic[T], Iterator[T]):
    """Batches of a source, some of them ahead; a thread takes them, one at a time.

    The thread ends with the batches, with `close`, or when this object is garbage. The source must
    not reuse the memory of a batch.
    """

    def __init__(self, batches: Iterable[T], wire: Wire, *, depth: int) -> None:
        if depth < 1:
            raise OptionError(f"{depth} batches ahead; 1 or more make sense")
        self._queue = _BatchQueue(batches, wire, depth)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.end).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            # The thread holds `_queue` and not `self`: an object that nobody holds is then freed,
            # and its finalizer ends the thread.
            take = self._queue.take
            self._thread = threading.Thread(target=take, name="penstock-ahead", daemon=True)
            self._thread.start()
        return self._queue.next()

    def close(self) -> None:
        """End the thread; wait a few seconds for the batch that it is taking, and drop it."""
        self._queue.end()
        if self._thread is not None:
            self._thread.join(_JOIN_S)


class _BatchQueue(Generic[T]):
    """Batches that were taken and not used yet, and how more are taken."""

    def __init__(self, batches: Iterable[T], wire: Wire, depth: int) -> None:
        self._batches = batches
        self._wire = wire
        self._depth = depth
        # Guards `ready` and the end. Notified when there is a batch, room for one, or the end.
        self._changed = threading.Condition()
        self.ready: deque[T] = deque()
        self._stages: Any = None
        """The batches in stages, if the source has them: it can be told which of them was used."""
        self._has_ended = self._is_closed = False
        self._error: BaseException | None = None

    def next(self) -> T:
        """Return the next batch, when it is ready."""
        with self._changed:
            while not self.ready:
                if self._error is not None:
                    raise self._error
                if self._has_ended or self._is_closed:
                    raise StopIteration
                self._changed.wait()
            batch = self.ready.popleft()
            if self._stages is not None:
                self._stages.used()
            self._changed.notify_all()
        # Not under our lock: the wire has its own, under which it asks whether a load is urgent.
        self._wire.look_again()
        return batch

    def end(self) -> None:
        """Take no more."""
        with self._changed:
            self._is_closed = True
            self.ready.clear()
            self._changed.notify_all()
        self._wire.look_again()
        if self._stages is not None:
            self._stages.close()

    def take(self) -> None:
        """Take batches until all are taken or `end` was called."""
        try:
            for batch in self._each():
                with self._changed:
                    self.ready.append(batch)
                    self._changed.notify_all()
                    while len(self.ready) >= self._depth and not self._is_closed:
                        self._changed.wait()
                self._wire.hold(self._is_urgent)
                if self._is_closed:
                    return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _is_urgent(self) -> bool:
        return not self.ready or self._is_closed

    def _each(self) -> Iterator[T]:
        if not hasattr(self._batches, "stages"):
            yield from self._batches
            return
        self._stages = stages = self._batches.stages()
        while True:
            try:
                fetched = stages.fetch()
            except StopIteration:
                return
            yield stages.decode(fetched)


class WatchedComm(Comm):
    """A Comm that tells a wire of its operations."""

    def __init__(self, comm: Comm, over: Wire) -> None:
        super().__init__(comm.axis, rank=comm.rank, size=comm.size)
        self.device_type, self.takes_parts = comm.device_type, comm.takes_parts
        self._comm, self._over = comm, over

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, without headers."""
        return self._comm.sent_bytes

    def begin(self, collective: Collective) -> Handle:
        """Begin a collective, and tell the wire."""
        return self._over.begun(self._comm.begin(collective), collective.size_bytes)

    def barrier(self) -> None:
        """Return when all ranks have come here and everything begun on this lane is done."""
        self._comm.barrier()

    def close(self) -> None:
        """Wait for what is under way and end the lane's thread."""
        self._comm.close()
