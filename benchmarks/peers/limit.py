"""The limits: what the machine does when nothing but the work itself is done.

The order is made beforehand and batch buffers are reused. Rows are gathered and blobs are copied by
one thread or two, images are decoded and resized from bytes in memory by one process or two. Each
makes whole batches, so that they never wait for each other. The loop that uses the batches is the
same as everybody's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.bare import Bare, Slot
from benchmarks.works import IMAGE_SIDE, SEED, Ragged, Work, open_source

NUM_ORDERS = 2
"""Orders made beforehand, so that no epoch finds its rows in the processor's cache by habit."""

Fill = Callable[[np.ndarray, np.ndarray], object]
"""Makes the batch of some ids in a buffer."""


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    source = open_source(work, folder)
    rng = np.random.default_rng(SEED)
    orders = [rng.permutation(work.num_samples) for _ in range(NUM_ORDERS)]
    num_threads = int(variant[1:])
    if work.name == "jpeg":
        return images(work, source, orders, num_threads)
    fill, make_buffer = {"tokens": rows, "blobs": blobs}[work.name](work, source)
    pool = ThreadPoolExecutor(num_threads)
    # One being made by each thread, one ready for each, one in the hands of the training loop.
    buffers = [make_buffer() for _ in range(2 * num_threads + 1 if num_threads > 1 else 1)]

    def start(epoch: int) -> Iterator:
        order = orders[epoch % NUM_ORDERS]
        starts = range(0, len(order), work.batch_size)
        ids = (order[at : at + work.batch_size] for at in starts)
        if num_threads == 1:
            return (fill(batch, buffers[0]) for batch in ids)
        return ahead(pool, fill, ids, buffers)

    return start


def ahead(pool: ThreadPoolExecutor, fill: Fill, ids: Iterable, buffers: list) -> Iterator:
    """Yield batches in order while the threads make the next ones."""
    pending: deque = deque()
    for number, batch in enumerate(ids):
        pending.append(pool.submit(fill, batch, buffers[number % len(buffers)]))
        if len(pending) == len(buffers) - 1:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def rows(work: Work, source: np.ndarray) -> tuple[Fill, Callable[[], np.ndarray]]:
    def fill(ids: np.ndarray, buffer: np.ndarray) -> np.ndarray:
        # Any mode but "raise" lets take write into the buffer with no copy in between.
        return source.take(ids, axis=0, out=buffer[: len(ids)], mode="clip")

    shape = (work.batch_size, source.shape[1])
    return fill, lambda: np.empty(shape, source.dtype)


def blobs(work: Work, source: Ragged) -> tuple[Fill, Callable[[], np.ndarray]]:
    starts, ends = source.offsets[:-1].tolist(), source.offsets[1:].tolist()
    data = np.asarray(source.bytes)  # a plain array: slices of a memmap cost more

    def fill(ids: np.ndarray, buffer: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        made, at = [], 0
        for i in ids.tolist():
            blob = data[starts[i] : ends[i]]
            made.append(buffer[at : at + len(blob)])
            made[-1][:] = blob
            at += len(blob)
        return made, ids

    largest = int(np.diff(source.offsets).max())
    return fill, lambda: np.empty(work.batch_size * largest, np.uint8)


def images(
    work: Work, source: Ragged, orders: list[np.ndarray], num_processes: int
) -> Callable[[int], Iterator]:
    from benchmarks.images import decode

    in_memory = [source[i].tobytes() for i in range(len(source))]

    def fill(number: int, slot: Slot) -> None:
        epoch, at = divmod(number, work.num_batches)
        ids = orders[epoch % NUM_ORDERS][at * work.batch_size :][: work.batch_size]
        for place, i in zip(slot[0], ids, strict=True):
            place[:] = decode(in_memory[i])
        slot[1][:] = ids

    shape = (work.batch_size, IMAGE_SIDE, IMAGE_SIDE, 3)
    made = Bare(fill, [(shape, np.uint8), (shape[:1], np.int64)], num_processes)

    def start(epoch: int) -> Iterator:
        numbers = range(epoch * work.num_batches, (epoch + 1) * work.num_batches)
        return map(tuple, made.batches(numbers))

    return start
