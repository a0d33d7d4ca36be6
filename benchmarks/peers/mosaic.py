"""MosaicML Streaming: shards in MDS, uncompressed, read in place through torch's DataLoader."""

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.works import ROW_LENGTH, SEED, Ragged, Work


def stand_in_for_torchvision() -> None:
    """Name what Streaming's own vision sets import, which are not used here.

    The wheels of torchvision want a CUDA build of torch and fail to import beside a CPU build.
    """
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms")
    for name in (*names, "torchvision.transforms.functional"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})
    sys.modules["torchvision.transforms.functional"].to_tensor = None


stand_in_for_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

COLUMNS = {
    "tokens": {"data": f"ndarray:int32:{ROW_LENGTH}"},
    "blobs": {"data": "bytes", "label": "int"},
    "jpeg": {"data": "bytes", "label": "int"},
}


class Images(StreamingDataset):
    """Decodes as an image is read."""

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        from benchmarks.images import decode

        sample = super().__getitem__(i)
        return decode(sample["data"]), sample["label"]


def write(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    with MDSWriter(out=str(folder), columns=COLUMNS[work.name], exist_ok=True) as out:
        for i in range(work.num_samples):
            data = source[i] if work.name == "tokens" else source[i].tobytes()
            out.write({"data": data, "label": i} if work.has_label else {"data": data})


def open_loader(work: Work, folder: Path, variant: str) -> Callable[[int], Iterator]:
    loader = torch_loader(work, folder, variant)
    if work.has_label:
        return lambda _: iter(loader)
    return lambda _: map(itemgetter("data"), loader)


def torch_loader(work: Work, folder: Path, variant: str) -> DataLoader:
    clean_stale_shared_memory()
    kind = Images if work.name == "jpeg" else StreamingDataset
    size = {"batch_size": work.batch_size}
    samples = kind(local=str(folder), shuffle=True, shuffle_seed=SEED, **size)
    workers = int(variant[1:])
    if work.name == "blobs":
        size["collate_fn"] = listed
    return DataLoader(samples, num_workers=workers, persistent_workers=workers > 0, **size)


class Stateful(StreamingDataLoader):
    """Its loader knows where it stands; this one hands out rows instead of dicts."""

    def __iter__(self) -> Iterator:
        return map(itemgetter("data"), super().__iter__())


def open_stateful(work: Work, folder: Path, variant: str) -> Stateful:
    clean_stale_shared_memory()
    size = {"batch_size": work.batch_size}
    samples = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=SEED, **size)
    return Stateful(samples, num_workers=int(variant[1:]), **size)


def listed(samples: list[dict]) -> tuple[list[bytes], torch.Tensor]:
    labels = torch.tensor([sample["label"] for sample in samples])
    return [sample["data"] for sample in samples], labels
