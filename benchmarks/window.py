"""The timed window: how fast batches arrive at a loop that reads them (`loops.touch`).

A loader is seen as `start(epoch)`, an iterable of the batches of one epoch. The clock runs between
the first batch of an epoch and its last, over as many epochs as the window needs: waiting for the
first batch is reported apart, and rates do not depend on how short the set is. Whatever a loader
has made ready before its first batch counts in its favour, for every loader alike.

Looking into a batch (`look`) happens outside of the window only.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from benchmarks import look, loops, tree
from benchmarks.works import Ragged, Work

Start = Callable[[int], Iterable]

WARM_UP_S = 0.3
BATCHES_LOOKED_AT = 16


class Window:
    """A clock of wall and CPU time that can be stopped and started again."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.machine_s = 0.0
        self.children: list[int] = []

    def go(self) -> None:
        self.cpu_at, self.machine_at = tree.cpu_s(tree.descendants()), tree.machine_s()
        self.at = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.at
        self.children = tree.descendants()  # Loaders start workers when they find that they help.
        self.cpu_s += tree.cpu_s(self.children) - self.cpu_at
        self.machine_s += tree.machine_s() - self.machine_at

    @property
    def others(self) -> float:
        """The share of the machine that other programs took."""
        return max(0.0, self.machine_s - self.cpu_s) / (self.seconds * (os.cpu_count() or 1))


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
    seen = look.Seen(work, source)
    for batch in epochs.take(BATCHES_LOOKED_AT):
        seen.add(batch)
    return {
        "samples": window.samples,
        "seconds": window.seconds,
        "cpu_s": window.cpu_s,
        "others": window.others,
        "first_batch_at": first_at,
        "mixing": seen.mixing(),
        "wrong": seen.num_wrong,
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
            loops.touch(batch)
            window.samples += num_samples_of(work, batch)
            if time.perf_counter() >= ends_at:
                window.stop()
                return window
        window.stop()
        epochs.next_epoch()
        if next(epochs.batches, None) is None:
            raise RuntimeError(f"epoch {epochs.epoch} has no batch")
        window.go()


def num_samples_of(work: Work, batch: object) -> int:
    return len(batch[1]) if work.has_label else len(batch)
