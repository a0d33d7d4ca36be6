"""SPDL: batches of indices pass through functions that run in two threads."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from spdl.pipeline import PipelineBuilder

from benchmarks.formats import file_of
from benchmarks.works import IMAGE_SIDE, SEED, Work

READY_BATCHES = 4


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    num_threads = int(variant[1:])
    make_batch = batch_maker(work, folder)

    def start(epoch: int) -> Iterator:
        builder = PipelineBuilder().add_source(index_batches(work, epoch))
        builder = builder.pipe(make_batch, concurrency=num_threads).add_sink(READY_BATCHES)
        pipeline = builder.build(num_threads=num_threads)
        with pipeline.auto_stop():
            yield from pipeline

    return start


def index_batches(work: Work, epoch: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng([SEED, epoch]).permutation(work.num_samples)
    for start in range(0, len(order), work.batch_size):
        yield order[start : start + work.batch_size]


def batch_maker(work: Work, folder: Path) -> Callable[[np.ndarray], object]:
    if work.name == "tokens":
        rows = np.load(folder / "tokens.npy", mmap_mode="r")
        return partial(np.take, rows, axis=0)
    paths = [str(file_of(work, folder, i)) for i in range(work.num_samples)]
    return partial(images if work.name == "jpeg" else blobs, paths)


def blobs(paths: list[str], ids: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    return [read(paths[i]) for i in ids], ids


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read()


def images(paths: list[str], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from benchmarks.images import decode

    pixels = np.empty((len(ids), IMAGE_SIDE, IMAGE_SIDE, 3), np.uint8)
    for place, i in zip(pixels, ids, strict=True):
        place[:] = decode(read(paths[i]))
    return pixels, ids
