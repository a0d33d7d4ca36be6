"""Bare processes: they fill batches in shared memory and do nothing else.

The limit of every loader whose work is decoding: no order is computed, nothing is read, checked or
counted; bytes are in memory before the processes start. A batch is a slot of shared memory. Slots
go out and come back as numbers over two pipes.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

Slot = list[np.ndarray]
"""The fields of one batch."""
Fill = Callable[[int, Slot], None]
"""Makes the batch of some number."""

MESSAGE = struct.Struct("ii")
SLOTS_EACH = 3
"""One being made, one ready and one in the loop's hands, for each process."""


class Bare:
    """Processes that make batches, until it is closed or its owner is gone.

    Args:
        fill: runs in the processes. They are forked, so it may hold any amount of data.
        fields: shape and type of each field of a batch.
        nice: how much lower than the caller's their priority is.
    """

    def __init__(
        self, fill: Fill, fields: Sequence[tuple[tuple, type]], num_processes: int, *, nice: int = 0
    ) -> None:
        self.slots = [
            [shared(*field) for field in fields] for _ in range(SLOTS_EACH * num_processes)
        ]
        task_out, self.task_in = os.pipe()
        self.done_out, done_in = os.pipe()
        self.pids = []
        for _ in range(num_processes):
            if (pid := os.fork()) == 0:
                # Else no reader of tasks sees the end of the pipe when the owner is gone.
                os.close(self.task_in)
                work(fill, self.slots, task_out, done_in, nice)
            self.pids.append(pid)
        # Else the owner waits forever for processes that died.
        os.close(task_out), os.close(done_in)
        self.free = list(range(len(self.slots)))
        self.num_pending = 0

    def batches(self, numbers: Iterable[int]) -> Iterator[Slot]:
        """Yield the batches of these numbers as they are made; each is valid until the next."""
        numbers = iter(numbers)
        while True:
            while self.free and (number := next(numbers, None)) is not None:
                os.write(self.task_in, MESSAGE.pack(number, self.free.pop()))
                self.num_pending += 1
            if not self.num_pending:
                return
            message = os.read(self.done_out, MESSAGE.size)
            if not message:
                raise RuntimeError("all bare processes have died")
            self.num_pending -= 1
            _, slot = MESSAGE.unpack(message)
            try:
                yield self.slots[slot]
            finally:
                self.free.append(slot)

    def close(self) -> None:
        os.close(self.task_in), os.close(self.done_out)
        for pid in self.pids:
            os.waitpid(pid, 0)


def shared(shape: tuple, dtype: type) -> np.ndarray:
    """Return an array in memory that forked processes share, with all its pages present."""
    array = np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
    array[:] = 0
    return array.reshape(shape)


def work(fill: Fill, slots: list[Slot], task_out: int, done_in: int, nice: int) -> None:
    """Make batches until the pipe of tasks ends; never return."""
    code = 1
    try:
        os.nice(nice)
        # A message is shorter than what a pipe takes and gives in one piece.
        while message := os.read(task_out, MESSAGE.size):
            number, slot = MESSAGE.unpack(message)
            fill(number, slots[slot])
            os.write(done_in, message)
        code = 0
    except BrokenPipeError:
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
