"""Everyone that `gpu_feed` measures: how each is opened, on the same images and the same rows."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import penstock
from benchmarks import loops, under_test
from benchmarks.bare import Bare, Slot
from benchmarks.formats import labelled, write_shards

NICE = 15
NUM_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    images: int = 6000
    batch: int = 256
    side: int = 224
    rows: int = 100_000
    row_batch: int = 16
    context: int = 1024
    seconds: float = 4.0
    warm_s: float = 2.0
    """Long enough for the loop to use up what a loader made while it started."""


QUICK = Sizes(
    images=96, batch=8, side=64, rows=512, row_batch=4, context=64, seconds=0.5, warm_s=0.2
)


@dataclass(kw_only=True)
class Feed:
    """One loader that is open."""

    batches: Iterable
    fields: Callable[[object], tuple[torch.Tensor, ...]] = tuple
    """The tensors of a batch, on the host."""
    told: Callable[[], dict] = dict
    """What the loader has counted so far."""


# -- data ------------------------------------------------------------------------------------


def write_images(jpegs: Path, folder: Path, sizes: Sizes) -> list[bytes]:
    """Write the same images as files for torch and as tar with labels for ours; return them."""
    given = [path.read_bytes() for path in sorted(jpegs.iterdir())]
    images = [given[i % len(given)] for i in range(sizes.images)]
    write_shards(folder / "tar", labelled("jpg", images, NUM_CLASSES))
    (folder / "files").mkdir()
    for i, data in enumerate(images):
        (folder / "files" / f"{i:06}.jpg").write_bytes(data)
    return images


def write_rows(folder: Path, sizes: Sizes) -> None:
    rows = np.random.default_rng(0).integers(0, 50_257, (sizes.rows, sizes.context), np.int32)
    np.save(folder / "rows.npy", rows)


# -- what every loader does with an image ----------------------------------------------------


def decoded(data: object) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def make_crop(side: int) -> Callable[[torch.Tensor], torch.Tensor]:
    from torchvision.transforms import v2

    return v2.RandomResizedCrop(side, antialias=True)


class Files(torch.utils.data.Dataset):
    """What a user of torch's DataLoader writes."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.paths = sorted(map(str, (folder / "files").iterdir()))
        self.crop = make_crop(sizes.side)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        pixels = decode_jpeg(read_file(self.paths[i]), ImageReadMode.RGB)
        return self.crop(pixels), i % NUM_CLASSES


# -- cases -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Cases:
    """Everyone who can be measured; each method opens one."""

    folder: Path
    sizes: Sizes
    device: str
    workers: int
    images: list[bytes] = field(default_factory=list)

    @contextlib.contextmanager
    def resident(self) -> Iterator[Feed]:
        side, batch = self.sizes.side, self.sizes.batch
        images = torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8)
        labels = torch.randint(0, NUM_CLASSES, (batch,))
        yield Feed(batches=[(images.to(self.device), labels.to(self.device))])

    @contextlib.contextmanager
    def resident_rows(self) -> Iterator[Feed]:
        shape = (self.sizes.row_batch, self.sizes.context)
        rows = torch.randint(0, 50_257, shape, dtype=torch.int32)
        yield Feed(batches=[(rows.to(self.device),)])

    @contextlib.contextmanager
    def torch_workers(self) -> Iterator[Feed]:
        yield Feed(
            batches=torch.utils.data.DataLoader(
                Files(self.folder, self.sizes),
                self.sizes.batch,
                shuffle=True,
                drop_last=True,
                num_workers=self.workers,
                prefetch_factor=4,
                persistent_workers=True,
                pin_memory=self.device == "cuda",
            )
        )

    @contextlib.contextmanager
    def bare(self) -> Iterator[Feed]:
        crop, size = make_crop(self.sizes.side), self.sizes.batch

        def fill(number: int, slot: Slot) -> None:
            for place in range(size):
                i = (number * size + place) % len(self.images)
                slot[0][place] = crop(decoded(self.images[i])).numpy()
                slot[1][place] = i % NUM_CLASSES

        shape = (size, 3, self.sizes.side, self.sizes.side)
        fields = [(shape, np.uint8), (shape[:1], np.int64)]
        made = Bare(fill, fields, self.workers, nice=NICE)
        with contextlib.closing(made), locked(made.slots, self.device):
            numbers = itertools.count()
            yield Feed(
                batches=made.batches(numbers),
                fields=lambda slot: tuple(map(torch.from_numpy, slot)),
            )

    def ours(self, where: str | int, *, decoder: str) -> contextlib.AbstractContextManager[Feed]:
        """Open a Loader as a user would write it."""
        crop = make_crop(self.sizes.side)

        def torchvision_sample(sample: dict) -> dict:
            return {"x": crop(sample["jpg"]).numpy(), "y": sample["cls"]}

        def built_in_sample(sample: dict) -> dict:
            pixels = torch.from_numpy(sample["jpg"]).permute(2, 0, 1)
            return {"x": crop(pixels).numpy(), "y": sample["cls"]}

        own = decoder == "built-in"
        shards = self.folder / "tar"
        return self.loader(
            penstock.open(shards) if own else penstock.open(shards, decoders={"jpg": decoded}),
            fields=("x", "y"),
            batch_size=self.sizes.batch,
            transform=built_in_sample if own else torchvision_sample,
            **under_test.workers(where),
        )

    def our_rows(self, where: str | int) -> contextlib.AbstractContextManager[Feed]:
        rows, size = penstock.open(self.folder / "rows.npy"), self.sizes.row_batch
        return self.loader(rows, ("data",), batch_size=size, **under_test.workers(where))

    @contextlib.contextmanager
    def loader(
        self, dataset: penstock.Dataset, fields: tuple[str, ...], **options: object
    ) -> Iterator[Feed]:
        with penstock.Loader(dataset, epochs=None, seed=1, drop_last=True, **options) as loader:
            yield Feed(
                batches=loader,
                fields=lambda batch: tuple(batch[name] for name in fields),
                told=lambda: under_test.told(loader.stats()),
            )


@contextlib.contextmanager
def locked(slots: list[Slot], device: str) -> Iterator[None]:
    """Page-lock shared memory, as a loader does once, so that copies to the device can overlap."""
    if device != "cuda":
        yield
        return
    runtime = torch.cuda.cudart()
    arrays = [array for slot in slots for array in slot if array.nbytes >= loops.PAGE]
    for array in arrays:
        torch.cuda.check_error(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for array in arrays:
            runtime.cudaHostUnregister(array.ctypes.data)


Opens = Callable[[], contextlib.AbstractContextManager[Feed]]


def groups_of(cases: Cases) -> dict[str, dict[str, Opens]]:
    """Return the cases of each group by the name that the table gives them; limits come first."""
    number = cases.workers
    ours = {
        "ours": lambda: cases.ours("auto", decoder="torchvision"),
        "ours, built-in decoder": lambda: cases.ours("auto", decoder="built-in"),
    }
    here = {"ours, here": lambda: cases.ours("here", decoder="torchvision")}
    bare = {f"bare, {number} processes": cases.bare}
    torchs = {f"torch, {number} workers": cases.torch_workers}
    return {
        "images": {"resident": cases.resident, **bare, **torchs, **ours, **here},
        "alone": {**bare, **torchs, **ours},
        "tokens": {
            "resident": cases.resident_rows,
            "ours": lambda: cases.our_rows("auto"),
            "ours, here": lambda: cases.our_rows("here"),
        },
    }
