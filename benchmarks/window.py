"""The timed window: how fast batches arrive at a loop that does nothing else.

A loader is seen as `start(epoch)`, an iterable of the batches of one epoch. The clock runs between
the first batch of an epoch and its last, over as many epochs as the window needs: waiting for the
first batch is reported apart, and rates do not depend on how short the set is. Whatever a loader
has made ready before its first batch counts in its favour, for every loader alike.

A batch is an array of rows (tokens), a sequence of byte strings (blobs) or a pair of images and
labels (jpeg), in the loader's own types. Looking into it happens outside of the window only.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from benchmarks import tree
from benchmarks.works import IMAGE_SIDE, Ragged, Work

Start = Callable[[int], Iterable]

WARM_UP_S = 0.3
BATCHES_LOOKED_AT = 16
STRIDE = {"tokens": 61, "blobs": 4093}
PIXEL_TOLERANCE = 1.0


class Window:
    """A clock of wall and CPU time that can be stopped and started again."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.children: list[int] = []

    def go(self) -> None:
        self.children = tree.descendants()
        self.cpu_at = tree.cpu_s(self.children)
        self.at = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.at
        self.cpu_s += tree.cpu_s(self.children) - self.cpu_at


def measure(start: Start, work: Work, source: np.ndarray | Ragged, *, seconds: float) -> dict:
    """Return one window: samples, seconds, CPU, memory, mixing and when the first batch came."""
    epochs = Epochs(start)
    first = next(epochs.batches)
    first_at = time.time()
    count = num_samples_of(work, first)
    del first
    run_for(epochs, work, WARM_UP_S)
    window = run_for(epochs, work, seconds)
    memory = tree.memory_bytes(window.children)
    assert count == work.batch_size, f"a batch of {count} samples, {work.batch_size} asked"
    looked = [look(work, batch, source) for batch in epochs.take(BATCHES_LOOKED_AT)]
    return {
        "samples": window.samples,
        "seconds": window.seconds,
        "cpu_s": window.cpu_s,
        "first_batch_at": first_at,
        "mixing": mixing([ids for ids, _ in looked], work.num_samples),
        "wrong": sum(wrong for _, wrong in looked),
        **memory,
    }


class Epochs:
    """One epoch after the other, so that a window may end in the midst of any."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.epoch = 0
        self.batches: Iterator = iter(start(0))

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batches = iter(self.start(self.epoch))

    def take(self, num_batches: int) -> Iterator:
        """Yield batches one by one: a loader may reuse the buffer of the one before."""
        taken = 0
        while taken < num_batches:
            for batch in self.batches:
                yield batch
                taken += 1
                if taken == num_batches:
                    return
            self.next_epoch()


def run_for(epochs: Epochs, work: Work, seconds: float) -> Window:
    """Receive batches until the clock has run for some seconds, stopping it between epochs."""
    window = Window()
    window.go()
    while True:
        ends_at = window.at + seconds - window.seconds
        for batch in epochs.batches:
            window.samples += num_samples_of(work, batch)
            if time.perf_counter() >= ends_at:
                window.stop()
                return window
        window.stop()
        epochs.next_epoch()
        if next(epochs.batches, None) is None:
            raise RuntimeError(f"epoch {epochs.epoch} has no batch")
        window.go()


def check(start: Start, work: Work, source: np.ndarray | Ragged) -> dict:
    """Return what a whole epoch delivered: ids missing, ids repeated, samples with wrong bytes."""
    seen = np.zeros(work.num_samples, np.int64)
    looked = [look(work, batch, source) for batch in start(0)]
    for ids, _ in looked:
        np.add.at(seen, ids, 1)
    return {
        "missing": int((seen == 0).sum()),
        "repeated": int(np.maximum(seen - 1, 0).sum()),
        "wrong": sum(wrong for _, wrong in looked),
        "mixing": mixing([ids for ids, _ in looked], work.num_samples),
    }


def look(work: Work, batch: object, source: np.ndarray | Ragged) -> tuple[np.ndarray, int]:
    """Return the ids of a batch, and how many of its samples are not the source's."""
    ids = ids_of(work, batch)
    return ids, count_wrong(work, ids, batch, source)


def num_samples_of(work: Work, batch: object) -> int:
    return len(batch[1]) if work.name == "jpeg" else len(batch)


def ids_of(work: Work, batch: object) -> np.ndarray:
    """Return the ids that the samples of a batch carry."""
    if work.name == "tokens":
        return np.array(batch)[:, 0].astype(np.int64)
    if work.name == "jpeg":
        return np.array(batch[1]).astype(np.int64).reshape(-1)
    heads = [bytes(memoryview(blob)[:8]) for blob in as_bytes(batch)]
    return np.frombuffer(b"".join(heads), "<i8")


def as_bytes(batch: Iterable) -> list:
    """Return blobs as buffers; tensors have none of their own."""
    return [blob.numpy() if hasattr(blob, "numpy") else blob for blob in batch]


def mixing(batches: list[np.ndarray], num_samples: int) -> float:
    """Return how far apart neighbours in a batch lie, where a uniform permutation gives 1.

    >>> round(mixing([np.arange(256)], 400_000), 6)
    7e-06
    """
    gaps = np.concatenate([np.abs(np.diff(ids)) for ids in batches])
    uniform = (num_samples**2 - 1) / (3 * num_samples)
    return float(gaps.mean() / uniform)


def count_wrong(work: Work, ids: np.ndarray, batch: object, source: np.ndarray | Ragged) -> int:
    """Return how many samples differ from the source, at a stride: proof that bytes came."""
    if work.name == "tokens":
        got = np.array(batch)[:, :: STRIDE["tokens"]]
        return int((got != source[ids, :: STRIDE["tokens"]]).any(axis=1).sum())
    if work.name == "jpeg":
        return count_wrong_images(ids, np.array(batch[0]), source)
    return sum(
        not same_bytes(np.frombuffer(blob, np.uint8), source[i])
        for i, blob in zip(ids, as_bytes(batch), strict=True)
    )


def same_bytes(got: np.ndarray, expected: np.ndarray) -> bool:
    stride = STRIDE["blobs"]
    return len(got) == len(expected) and np.array_equal(got[::stride], expected[::stride])


def count_wrong_images(ids: np.ndarray, images: np.ndarray, source: Ragged) -> int:
    """Compare the first image of a batch only: decoding all of them again would double the work."""
    from benchmarks.images import decode

    if images.shape != (len(ids), IMAGE_SIDE, IMAGE_SIDE, 3) or images.dtype != np.uint8:
        return len(ids)
    expected = decode(source[ids[0]].tobytes()).astype(np.int16)
    return int(np.abs(images[0] - expected).mean() > PIXEL_TOLERANCE)
