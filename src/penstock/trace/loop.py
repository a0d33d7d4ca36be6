"""The training loop as its loader sees it: when it asked, when it got, what its thread did between.

Between two batches the training thread computes or issues kernels. The kernel's accounting says how
long it ran and how long it was runnable without a core; the preloaded library of `penstock trace`
says how long it waited for the interpreter's lock. What is left was spent blocked, as a rule on the
device.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from penstock.trace.device import DeviceTimes
from penstock.trace.operations import OperationCount
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Kind

_FACTS_EVERY_NS = 2_000_000
"""Asking the kernel takes 2 µs: steps shorter than this share an answer."""
_NO_WAIT_NS = 200_000
"""A batch that came this soon was ready: a LAUNCH row may go on over it."""
_LONG_NS = 1_000_000
"""Work that takes so long is measured with the kernel's help, at 5 µs."""
_PAUSE_NS = 20_000_000
"""After work between two waits that was too short for a row, more of it is likely: for so long the
kernel is not asked when work begins."""
_DESCRIPTOR_MIN = 700
"""Descriptors that stay open are no lower, and below 1024, where a process may have so few."""
LOCK_UNKNOWN_NS = -1
"""`lock_ns` where nobody measured the wait for the interpreter's lock."""

_log = logging.getLogger("penstock.trace")


class ThreadTimes:
    """What a thread did so far, by the kernel's accounting. Used by that thread alone."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self._file = _opened(f"/proc/self/task/{self.thread}/schedstat")
        self._lock_wait = _lock_wait_function()

    def now(self) -> tuple[int, int, int]:
        """Return nanoseconds on a core, runnable without one, and waiting for the lock."""
        lock_ns = LOCK_UNKNOWN_NS if self._lock_wait is None else self._lock_wait()
        # The file's own first number is the time on a core as of the last tick, up to 10 ms ago.
        cpu_ns = time.thread_time_ns()
        if self._file is None:
            return cpu_ns, 0, lock_ns
        try:
            return cpu_ns, int(os.pread(self._file, 64, 0).split()[1]), lock_ns
        except (OSError, ValueError, IndexError):
            self._file = None  # The program has closed it: the number is not ours any more.
            return cpu_ns, 0, lock_ns

    def __del__(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)


class WorkTimes(threading.local):
    """What each thread did during its spans of work: nanoseconds on a core, and runnable without.

    Work of some microseconds would take longer by asking the kernel twice, so the wait is measured
    for threads whose latest work was long; for others it is 0.
    """

    def __init__(self) -> None:
        self._times: ThreadTimes | None = None
        """Made for the first long work, and kept: opening it costs more than 20 uses."""
        self._was_long = False

    def begin(self) -> tuple[int, int]:
        """Return what `end` is given when the work is done."""
        if not self._was_long or self._times is None:
            return time.thread_time_ns(), -1
        return self._times.now()[:2]

    def end(self, begun: tuple[int, int], took_ns: int) -> tuple[int, int]:
        """Return time on a core and time without one."""
        if begun[1] >= 0 and self._times is not None:
            cpu_ns, wait_ns, _ = self._times.now()
            found = cpu_ns - begun[0], wait_ns - begun[1]
        else:
            found = time.thread_time_ns() - begun[0], 0
        self._was_long = took_ns >= _LONG_NS
        if self._was_long and self._times is None:
            self._times = ThreadTimes()
        return found


class LoopRecorder:
    """Records the questions of a training loop and its work between them."""

    def __init__(self, recorder: Recorder, *, launches: bool = True, object_id: int = 0) -> None:
        """`launches`: whether what the asking thread does in between is a step. `object_id`: of the
        loader, where it is always the same."""
        self._recorder = recorder
        self._object_id = object_id
        self.pid = os.getpid()
        self.is_with_gradients = False
        self._launches = launches
        self._times: ThreadTimes | None = None
        self._since_ns = 0
        """When the work began that no LAUNCH row covers yet; 0: there is none."""
        self._before = (0, 0, 0)
        self._num_steps = 0
        self._not_before_ns = 0
        """Work that begins earlier goes without a row."""
        self._num_launches = 0
        self._device: DeviceTimes | None = None
        """Once there is a device."""
        self._operations: OperationCount | None = OperationCount(recorder) if launches else None
        self._is_counting = False
        """Whether operations of this step are counted."""

    def is_of_other(self, recorder: Recorder, object_id: int) -> bool:
        """Return whether another loader of this run is trained on here."""
        is_here = self.pid == os.getpid() and self._recorder is recorder
        return is_here and self.is_with_gradients and self._object_id != object_id

    def paused(self) -> None:
        """Note that the process turns to another loader: that is no work of a step."""
        self.asked_at(time.perf_counter_ns())
        self._since_ns = self._num_steps = 0
        if self._device is not None:
            self._device.waited()

    def left(self) -> None:
        """Note that nobody iterates any more, perhaps before the end."""
        self.step_ended()

    def asked(self) -> int:
        """Note that the loop asks for a batch; return when."""
        now_ns = time.perf_counter_ns()
        self.asked_at(now_ns)
        return now_ns

    def asked_at(self, now_ns: int) -> None:
        """Note that the loop asks for a batch now."""
        if self._since_ns and now_ns - self._since_ns >= _FACTS_EVERY_NS:
            self._record_launch(now_ns)
        if self._is_counting:
            self.step_ended()
        if self._device is not None:
            self._try(self._device.asked, now_ns)

    def step_ended(self) -> None:
        """Note that a step is over, though the loop has not asked for the next batch yet."""
        if self._is_counting and self._operations is not None:
            self._is_counting = False
            self._try(self._operations.ended)

    def got(
        self,
        asked_ns: int,
        *,
        wait_ns: int,
        step: int = -1,
        epoch: int = -1,
        count: int = 0,
        size_bytes: int = 0,
        flags: int = 0,
        object_id: int = 0,
    ) -> None:
        """Record a batch that the loop gets now."""
        now_ns = time.perf_counter_ns()
        self.took(asked_ns, now_ns, wait_ns, (step, epoch, count, size_bytes, flags), object_id)

    def took(
        self,
        asked_ns: int,
        now_ns: int,
        wait_ns: int,
        what: tuple[int, int, int, int, int],
        object_id: int = 0,
    ) -> None:
        """Record a batch that was asked for and came at known times.

        `what` it is: step, epoch, samples, bytes, flags; `object_id`: of which loader.
        """
        self._recorder.next_row(asked_ns, now_ns, wait_ns, what, object_id or self._object_id)
        if now_ns - asked_ns >= _NO_WAIT_NS:
            # A LAUNCH row is work. Short work before a wait goes without a row: the wait inside it
            # would look like work, and asking the kernel before every wait costs too much.
            if self._since_ns:
                self._not_before_ns = now_ns + _PAUSE_NS
            self._since_ns = self._num_steps = 0
            if self._device is not None:
                self._device.waited()
        self._num_steps += 1
        if self._device is not None:
            self._try(self._device.got, what[0], now_ns)
        if not self._since_ns and self._launches and now_ns >= self._not_before_ns:
            self._look_at_torch(what[0], now_ns)
            if self._times is None or self._times.thread != threading.get_native_id():
                self._times = ThreadTimes()
            self._before = self._times.now()
            self._since_ns = now_ns

    def ended(self) -> None:
        """Note that the loop asks for no more: what it does from here on is no step."""
        self._since_ns = self._num_steps = 0
        self.step_ended()
        if self._device is not None:
            self._try(self._device.record_finished)
        self._recorder.flush()

    def _look_at_torch(self, step: int, now_ns: int) -> None:
        """Look whether there is a device by now, and count operations of some early steps."""
        torch: Any = sys.modules.get("torch")
        if torch is None or self._operations is None:
            return
        if self._device is None and torch.cuda.is_initialized():
            self._device = DeviceTimes(self._recorder)
            self._try(self._device.got, step, now_ns)
        self._try(self._operations.got, self._num_launches)
        self._num_launches += 1
        self._is_counting = self._operations is not None and self._operations.is_counting

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call what asks torch: a failure costs these rows, and not the training."""
        try:
            call(*arguments)
        except Exception as error:
            _log.warning("devices and operations are not recorded any more: %r", error)
            self._device = self._operations = None
            self._is_counting = False

    def _record_launch(self, now_ns: int) -> None:
        times = self._times
        if times is not None and times.thread == threading.get_native_id():
            after, before = times.now(), self._before
            has_lock = after[2] != LOCK_UNKNOWN_NS
            self._recorder.span(
                Kind.LAUNCH,
                self._since_ns,
                now_ns,
                cpu_ns=after[0] - before[0],
                wait_ns=after[1] - before[1],
                lock_ns=after[2] - before[2] if has_lock else LOCK_UNKNOWN_NS,
                count=self._num_steps,
            )
        self._since_ns = self._num_steps = 0


class ValidationRecorder(LoopRecorder):
    """Records a pass over a loader that is not trained on, as one row."""

    def __init__(self, recorder: Recorder, *, object_id: int = 0) -> None:
        super().__init__(recorder, launches=False, object_id=object_id)
        self._begun_ns = time.perf_counter_ns()
        self._taken = np.zeros(3, np.int64)
        """Batches, nanoseconds of waiting, bytes."""
        self._epoch = -1

    def took(
        self,
        asked_ns: int,
        now_ns: int,
        wait_ns: int,
        what: tuple[int, int, int, int, int],
        object_id: int = 0,
    ) -> None:
        """Count a batch."""
        self._taken += 1, wait_ns, what[3]
        self._epoch = what[1]

    def ended(self) -> None:
        """Record the pass."""
        count, wait_ns, size_bytes = self._taken.tolist()
        if count:
            self._taken[:] = 0
            self._recorder.span(
                Kind.VALIDATE,
                self._begun_ns,
                time.perf_counter_ns(),
                object_id=self._object_id,
                count=count,
                wait_ns=wait_ns,
                size_bytes=size_bytes,
                epoch=self._epoch,
            )
            self._recorder.flush()

    left = ended


_latest: LoopRecorder | None = None
"""Of the loader that was trained on last in this process."""


def begin_loop(recorder: Recorder, *, object_id: int, launches: bool = True) -> LoopRecorder:
    """Return what records a loop that begins now.

    It is validation if gradients are off, and a loop over another loader had them on.
    """
    global _latest
    torch: Any = sys.modules.get("torch")
    before, has_gradients = _latest, torch is not None and torch.is_grad_enabled()
    is_second = before is not None and before.is_of_other(recorder, object_id)
    if before is not None and is_second and launches and not has_gradients:
        before.paused()
        return ValidationRecorder(recorder, object_id=object_id)
    loop = LoopRecorder(recorder, launches=launches, object_id=object_id)
    loop.is_with_gradients = has_gradients
    if launches:
        _latest = loop
    return loop


def _opened(path: str) -> int | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # The kernel was built without it, or this is not Linux.
    try:
        # A program that closes all descriptors gets low numbers for those that it opens then.
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR_MIN)
    except OSError:
        return None
    finally:
        os.close(file)


@cache
def _lock_wait_function() -> Callable[[], int] | None:
    """Return the preloaded library's count for this thread; None where it is not loaded."""
    try:
        function = ctypes.CDLL(None).penstock_lock_wait_ns
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int64
    found: Callable[[], int] = function
    return found
