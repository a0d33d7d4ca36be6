"""Grain: an index pipeline over ArrayRecord files, or over the mapped array for tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.works import SEED, Ragged, Work

RECORDS_PER_FILE = 1024
LABEL_BYTES = 8


class Rows:
    """Rows of a mapped array, mapped again in each worker: pickling a map would copy it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = np.load(folder / "tokens.npy", mmap_mode="r")

    def __reduce__(self) -> tuple:
        return Rows, (self.folder,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.rows[i]


def write(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    """Write one record a group, uncompressed, so that a record can be read alone."""
    for start in range(0, work.num_samples, RECORDS_PER_FILE):
        path = folder / f"{start:08}.array_record"
        out = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for i in range(start, min(start + RECORDS_PER_FILE, work.num_samples)):
            out.write(i.to_bytes(LABEL_BYTES, "little") + source[i].tobytes())
        out.close()


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    def start(epoch: int) -> Iterator:
        return iter(batches(work, folder, variant, epoch))

    return start


def batches(work: Work, folder: Path, variant: str, epoch: int) -> grain.IterDataset:
    samples = grain.MapDataset.source(source_of(work, folder)).shuffle(seed=SEED + epoch)
    if work.has_label:
        samples = samples.map(image if work.name == "jpeg" else blob)
    batch_fn = {"batch_fn": listed} if work.name == "blobs" else {}
    whole = samples.batch(work.batch_size, drop_remainder=False, **batch_fn)
    read = whole.to_iter_dataset(read_options(work, variant))
    if variant == "w0":
        return read
    return read.mp_prefetch(grain.MultiprocessingOptions(num_workers=int(variant[1:])))


class Stateful:
    """State lives in Grain's iterators."""

    def __init__(self, data: grain.IterDataset) -> None:
        self.iterator = iter(data)

    def __iter__(self) -> Iterator:
        return self.iterator

    def state_dict(self) -> dict:
        return self.iterator.get_state()

    def load_state_dict(self, state: dict) -> None:
        self.iterator.set_state(state)


def open_stateful(work: Work, folder: Path, variant: str) -> Stateful:
    return Stateful(batches(work, folder, variant, 0))


def read_options(work: Work, variant: str) -> grain.ReadOptions:
    """Return the threads that were best here: none where bytes lie in memory, as its guide says."""
    if work.name != "jpeg":
        return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    threads = 2 if variant == "w0" else 1
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)


def source_of(work: Work, folder: Path) -> Rows | grain.sources.ArrayRecordDataSource:
    if work.name == "tokens":
        return Rows(folder)
    return grain.sources.ArrayRecordDataSource(sorted(map(str, folder.iterdir())))


def blob(record: bytes) -> tuple[bytes, int]:
    return record[LABEL_BYTES:], int.from_bytes(record[:LABEL_BYTES], "little")


def listed(samples: list[tuple[bytes, int]]) -> tuple[list[bytes], np.ndarray]:
    blobs, labels = zip(*samples, strict=True)
    return list(blobs), np.array(labels)


def image(record: bytes) -> tuple[np.ndarray, int]:
    from benchmarks.images import decode

    label = int.from_bytes(record[:LABEL_BYTES], "little")
    return decode(memoryview(record)[LABEL_BYTES:]), label
