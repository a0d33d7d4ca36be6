"""LitData: chunks of 64 MB, token rows with its own loader for tokens, read where they lie."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmarks.peers.torch import listed
from benchmarks.works import ROW_LENGTH, SEED, Ragged, Work, open_source

CHUNK_BYTES = "64MB"


class Sample:
    """Makes sample i; chunk writers are processes and open the source for themselves."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.work, self.folder, self.source = work, folder, None

    def __call__(self, i: int) -> torch.Tensor | tuple[bytes, int]:
        if self.source is None:
            self.source = open_source(self.work, self.folder)
        if self.work.name == "tokens":
            return torch.from_numpy(np.array(self.source[i]))
        return self.source[i].tobytes(), i


def write(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    path = Path(source.filename if work.name == "tokens" else source.bytes.filename)
    optimize(
        fn=Sample(work, path.parent),
        inputs=list(range(work.num_samples)),
        output_dir=str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        item_loader=item_loader(work),
        verbose=False,
    )


def item_loader(work: Work) -> TokensLoader | None:
    return TokensLoader(block_size=ROW_LENGTH) if work.name == "tokens" else None


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    loader = open_stateful(work, folder, variant)
    return lambda _: iter(loader)


def open_stateful(work: Work, folder: Path, variant: str) -> StreamingDataLoader:
    samples = StreamingDataset(
        str(folder),
        item_loader=item_loader(work),
        shuffle=True,
        drop_last=False,
        seed=SEED,
        # Its defaults shuffle within 256 samples and decode these at once, slower on both counts.
        item_shuffle_window="full",
        batch_decode=0,
        # Its blobs are views of a mapped file: no byte has moved until one takes a copy.
        transform={"jpeg": image, "blobs": blob}.get(work.name),
    )
    workers = int(variant[1:])
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    if work.name == "blobs":
        options["collate_fn"] = listed
    return StreamingDataLoader(samples, batch_size=work.batch_size, **options)


def blob(sample: tuple[bytes, int]) -> tuple[bytes, int]:
    return bytes(sample[0]), sample[1]


def image(sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    from benchmarks.images import decode

    return decode(sample[0]), sample[1]
