"""What is loaded: three sets of samples, each made from a seed, each sample carrying its own id.

A source is what everybody's format is written from, and what the limits read. Rows of tokens have
one field; blobs and images have a label beside them, as nearly every real set has. Each sample
carries its id (the first int of a row, the label of the others), so order and completeness are
observed at the far end of a loader.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEED = 7
ROW_LENGTH = 512
IMAGE_SIDE = 224
DISTINCT_IMAGES = 2048
ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One set of samples and the batch it is loaded in."""

    name: str
    num_samples: int
    batch_size: int

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the short last one included."""
        return -(-self.num_samples // self.batch_size)

    @property
    def has_label(self) -> bool:
        """Whether a sample has a second field: its number, as a label."""
        return self.name != "tokens"


WORKS = {
    work.name: work
    for work in (
        Work(name="tokens", num_samples=400_000, batch_size=256),
        Work(name="blobs", num_samples=16_384, batch_size=256),
        Work(name="jpeg", num_samples=8_192, batch_size=64),
    )
}


class Ragged:
    """Samples of varying length in one mapped file: `data[i]` is a view of sample i."""

    def __init__(self, folder: Path) -> None:
        self.offsets = np.load(folder / "offsets.npy")
        self.bytes = np.memmap(folder / "samples.bin", dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.bytes[self.offsets[i] : self.offsets[i + 1]]

    @property
    def size_bytes(self) -> int:
        return int(self.offsets[-1])


def open_source(work: Work, folder: Path) -> np.ndarray | Ragged:
    """Return the samples of a work, indexed by sample id."""
    if work.name == "tokens":
        return np.load(folder / "tokens.npy", mmap_mode="r")
    return Ragged(folder)


def delivered_bytes(work: Work, source: np.ndarray | Ragged) -> float:
    """Return the mean size of a sample as the training loop receives it."""
    if work.name == "tokens":
        return ROW_LENGTH * 4
    if work.name == "jpeg":
        return IMAGE_SIDE * IMAGE_SIDE * 3
    return source.size_bytes / len(source)


def write_source(work: Work, folder: Path) -> None:
    if work.name == "tokens":
        write_tokens(work, folder)
    elif work.name == "blobs":
        write_ragged(folder, (blob(i) for i in range(work.num_samples)))
    else:
        from benchmarks.images import make_jpeg

        images = [make_jpeg(i) for i in range(DISTINCT_IMAGES)]
        write_ragged(folder, (images[i % len(images)] for i in range(work.num_samples)))


def write_tokens(work: Work, folder: Path) -> None:
    shape = (work.num_samples, ROW_LENGTH)
    rows = np.lib.format.open_memmap(folder / "tokens.npy", "w+", dtype=np.int32, shape=shape)
    rng = np.random.default_rng(SEED)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        part[:] = rng.integers(0, 50_257, part.shape, dtype=np.int32)
        part[:, 0] = np.arange(start, start + len(part))


def blob(i: int) -> bytes:
    """Return about 110 KB; sizes vary by about a third, as photos do."""
    rng = np.random.default_rng([SEED, i])
    size = int(np.clip(rng.gamma(9, 110_000 / 9), 20_000, 400_000))
    return rng.bytes(size)


def write_ragged(folder: Path, samples: object) -> None:
    lengths = [0]
    with (folder / "samples.bin").open("wb") as out:
        lengths += [out.write(sample) for sample in samples]
    np.save(folder / "offsets.npy", np.cumsum(lengths))
