"""A thread for one stage of a source, which does not keep the interpreter from ending.

The threads of an executor are joined when the interpreter ends, whatever they wait for; a source
may wait for ever for data from a queue or a network.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Worker"]

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Queue = SimpleQueue[_Work | None]


class Worker:
    """Does one thing after the other; its thread begins with the first and ends with `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: _Queue = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # The thread holds the queue and not `self`, so that it ends when this object is freed.
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run something after all that was submitted before."""
        if self._is_closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[Any] = Future()
        self._queue.put((future, work, args))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_do_all, args=(self._queue,), name=self._name, daemon=True
            )
            self._thread.start()
        return future

    def close(self) -> None:
        """Begin nothing more, and cancel what has not begun."""
        self._is_closed = True
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                item[0].cancel()
        self._queue.put(None)

    def ends_by(self, until_s: float) -> bool:
        """Wait for the thread's end until a time (monotonic); return whether it has ended."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, until_s - time.monotonic()))
        return not self._thread.is_alive()


def _do_all(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        _do(*item)
        del item  # It would keep its work's objects alive while the thread waits.


def _do(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
