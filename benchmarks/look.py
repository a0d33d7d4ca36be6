"""Looking into batches: are the bytes there, are they right, whose are they, how well mixed.

A batch is an array of rows (tokens), or a pair: byte strings and labels (blobs), images and labels
(jpeg), all in the loader's own types.
"""

import numpy as np

from benchmarks.tree import lies_in_file
from benchmarks.works import IMAGE_SIDE, Ragged, Work

STRIDE = {"tokens": 61, "blobs": 4093}
PIXEL_TOLERANCE = 1.0


class Seen:
    """What has come out of a loader so far."""

    def __init__(self, work: Work, source: np.ndarray | Ragged) -> None:
        self.work = work
        self.source = source
        self.ids: list[np.ndarray] = []
        self.num_wrong = 0

    def add(self, batch: object) -> None:
        """Look into one batch; it may be overwritten afterwards."""
        samples, ids = samples_of(self.work, batch), ids_of(self.work, batch)
        if lies_in_file(samples[0].__array_interface__["data"][0]):
            raise RuntimeError("samples are views of a mapped file: nothing was loaded")
        self.ids.append(ids)
        self.num_wrong += count_wrong(self.work, ids, samples, self.source)

    def mixing(self) -> float:
        return mixing(self.ids, self.work.num_samples)

    def faults(self) -> dict[str, int]:
        """Return how often a whole epoch failed to be each sample once, as it is in the source."""
        times = np.bincount(np.concatenate(self.ids), minlength=self.work.num_samples)
        return {
            "missing": int((times == 0).sum()),
            "repeated": int(np.maximum(times - 1, 0).sum()),
            "wrong": self.num_wrong,
        }


def samples_of(work: Work, batch: object) -> np.ndarray | list[np.ndarray]:
    """Return the samples as arrays over the very memory that the loader handed out."""
    if work.name == "blobs":
        return [
            np.frombuffer(blob, np.uint8) if isinstance(blob, bytes) else np.asarray(blob)
            for blob in batch[0]
        ]
    return np.asarray(batch[0] if work.has_label else batch)


def ids_of(work: Work, batch: object) -> np.ndarray:
    """Return a copy of the ids that the samples of a batch carry."""
    if work.has_label:
        return np.array(batch[1], np.int64).reshape(-1)
    return samples_of(work, batch)[:, 0].astype(np.int64)


def mixing(batches: list[np.ndarray], num_samples: int) -> float:
    """Return how far apart neighbours in a batch lie, where a uniform permutation gives 1.

    >>> round(mixing([np.arange(256)], 400_000), 6)
    7e-06
    """
    gaps = np.concatenate([np.abs(np.diff(ids)) for ids in batches])
    uniform = (num_samples**2 - 1) / (3 * num_samples)
    return float(gaps.mean() / uniform)


def count_wrong(
    work: Work, ids: np.ndarray, samples: np.ndarray | list, source: np.ndarray | Ragged
) -> int:
    """Return how many samples differ from the source, at a stride."""
    if work.name == "jpeg":
        return count_wrong_images(ids, samples, source)
    if work.name == "tokens":
        stride = STRIDE["tokens"]
        return int((samples[:, ::stride] != source[ids, ::stride]).any(axis=1).sum())
    return sum(not same_bytes(blob, source[i]) for i, blob in zip(ids, samples, strict=True))


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
