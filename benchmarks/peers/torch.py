"""PyTorch's DataLoader: map-style sets, a random sampler, the default collation where it fits."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.formats import file_of
from benchmarks.works import Work


class Rows:
    """Rows of a mapped array; an index may be a whole batch of them."""

    def __init__(self, folder: Path) -> None:
        self.array = np.load(folder / "tokens.npy", mmap_mode="r")
        with warnings.catch_warnings(action="ignore"):  # that torch might write to it: nobody does
            self.rows = torch.from_numpy(self.array)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | list[int]) -> torch.Tensor:
        if isinstance(i, int):
            return self.rows[i]
        return torch.from_numpy(self.array.take(i, axis=0))  # faster than torch's own gather


class Files:
    """A file for each sample; its number is the label, as a folder's name is in torchvision."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.paths = [str(file_of(work, folder, i)) for i in range(work.num_samples)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        with open(self.paths[i], "rb", buffering=0) as file:  # noqa: PTH123
            return file.read(), i


class Images(Files):
    """The same, decoded."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        from benchmarks.images import decode

        data, label = super().__getitem__(i)
        return torch.from_numpy(decode(data)), label


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    workers, _, how = variant.partition("-")
    num_workers = int(workers[1:])
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    if how == "batch":
        rows = Rows(folder)
        batches = BatchSampler(RandomSampler(rows), work.batch_size, drop_last=False)
        loader = DataLoader(rows, sampler=batches, batch_size=None, **options)
        return lambda _: iter(loader)
    samples = {"tokens": lambda: Rows(folder), "jpeg": lambda: Images(work, folder)}
    samples = samples.get(work.name, lambda: Files(work, folder))()
    if work.name == "blobs":  # of differing lengths, so they stay a list
        options["collate_fn"] = pack if how == "pack" else listed
    loader = DataLoader(samples, work.batch_size, shuffle=True, **options)
    return lambda _: map(unpack, loader) if how == "pack" else iter(loader)


def open_stateful(work: Work, folder: Path, variant: str) -> object:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        Rows(folder), work.batch_size, shuffle=True, num_workers=int(variant[1:])
    )


def listed(samples: list[tuple[bytes, int]]) -> tuple[list[bytes], torch.Tensor]:
    blobs, labels = zip(*samples, strict=True)
    return list(blobs), torch.tensor(labels)


def pack(samples: list[tuple[bytes, int]]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    blobs, labels = listed(samples)
    joined = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8)
    return joined, [len(blob) for blob in blobs], labels


def unpack(packed: tuple[torch.Tensor, list[int], torch.Tensor]) -> tuple[tuple, torch.Tensor]:
    joined, lengths, labels = packed
    return joined.split(lengths), labels
