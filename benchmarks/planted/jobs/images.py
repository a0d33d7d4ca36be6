"""Train on a folder of JPEG files, or on shards of them, with torch's DataLoader."""

import argparse
import io
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", help="folder, or address of a store that serves it")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--prefetch-factor", type=int, default=2)
parser.add_argument("--threads-per-worker", type=int, default=1)
parser.add_argument("--side", type=int, default=96, help="pixels of an image for the model")
parser.add_argument("--blur", type=int, default=0, help="width of the augmentation's filter")
parser.add_argument("--pack-files", action="store_true", help="the data lies in shards")
parser.add_argument("--cache-folder", default="", help="keep what comes from the store here")
parser.add_argument("--step-ms", type=float, default=0, help="the accelerator's time for a step")
parser.add_argument("--matmul", type=int, default=0, help="compute on this CPU: width of a layer")
parser.add_argument("--checkpoint", default="", help="file to save the state to")
parser.add_argument("--checkpoint-every", type=int, default=10)
parser.add_argument("--checkpoint-mb", type=int, default=100)
parser.add_argument("--async-checkpoint", action="store_true")


def read(name: str, offset: int = 0, size: int = -1) -> bytes:
    if name.startswith("http"):
        return urllib.request.urlopen(name).read()
    with Path(name).open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


class Images(Dataset):
    """Images by number. `extents.json` says where each one lies: file, offset, length."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder, self.cache_folder = args.data.rstrip("/"), args.cache_folder
        self.side, self.blur = args.side, args.blur
        self.extents = json.loads(read(f"{self.folder}/extents.json"))

    def __len__(self) -> int:
        return len(self.extents)

    def __getitem__(self, index: int) -> torch.Tensor:
        name, offset, size = self.extents[index]
        kept = Path(self.cache_folder, name)
        if self.cache_folder and kept.exists():
            return self.decode(kept.read_bytes())
        data = read(f"{self.folder}/{name}", offset, size)
        if self.cache_folder:
            kept.write_bytes(data)
        return self.decode(data)

    def decode(self, data: bytes) -> torch.Tensor:
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((self.side, self.side))
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if self.blur:
            tensor = torch.nn.functional.avg_pool2d(tensor, self.blur, 1, self.blur // 2)
        return tensor


class Packed(Images):
    """The same images from shards: a batch is one run of a shard, read at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        name, begin, _ = self.extents[indices[0]]
        _, last, last_size = self.extents[indices[-1]]
        run = read(f"{self.folder}/{name}", begin, last + last_size - begin)
        cuts = [self.extents[index][1:] for index in indices]
        return [self.decode(run[offset - begin : offset - begin + size]) for offset, size in cuts]


class Runs(BatchSampler):
    """Batches of neighbours, in another order in each epoch."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.starts = list(range(0, num_samples - batch_size + 1, batch_size))
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in random.sample(self.starts, len(self.starts)):
            yield list(range(start, start + self.batch_size))


def loader_of(args: argparse.Namespace) -> DataLoader:
    images = Packed(args) if args.pack_files else Images(args)
    workers = {}
    if args.num_workers:
        workers = {"prefetch_factor": args.prefetch_factor, "persistent_workers": True}
    if args.pack_files:
        batches = {"batch_sampler": Runs(len(images), args.batch_size)}
    else:
        batches = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True}
    return DataLoader(
        images,
        num_workers=args.num_workers,
        worker_init_fn=lambda _: torch.set_num_threads(args.threads_per_worker),
        **batches,
        **workers,
    )


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.weight = torch.randn(args.matmul, args.matmul)
        self.state = {"weights": torch.zeros(args.checkpoint_mb * 2**18)} if args.checkpoint else {}
        self.saving: threading.Thread | None = None

    def step(self, images: torch.Tensor) -> None:
        if self.args.matmul:
            rows = images.flatten()[: 64 * self.args.matmul].reshape(-1, self.args.matmul)
            for _ in range(8):
                rows = torch.tanh(rows @ self.weight)
        time.sleep(self.args.step_ms / 1000)  # The accelerator computes, the host waits for it.

    def save(self) -> None:
        if not self.args.async_checkpoint:
            torch.save(self.state, self.args.checkpoint)
            return
        if self.saving is not None:
            self.saving.join()
        copy = {name: tensor.clone() for name, tensor in self.state.items()}
        self.saving = threading.Thread(target=torch.save, args=(copy, self.args.checkpoint))
        self.saving.start()


def main() -> None:
    args = parser.parse_args()
    loader, trainer = loader_of(args), Trainer(args)
    begin_s, steps = 0.0, 0
    for _ in range(args.epochs):
        for images in loader:
            trainer.step(images)
            steps += 1
            if args.checkpoint and steps % args.checkpoint_every == 0:
                trainer.save()
            # The first step waits for the workers to start.
            begin_s = begin_s or time.perf_counter()
    seconds = time.perf_counter() - begin_s
    if trainer.saving is not None:
        trainer.saving.join()
    print(json.dumps({"samples_s": (steps - 1) * args.batch_size / seconds, "seconds": seconds}))


if __name__ == "__main__":
    main()
