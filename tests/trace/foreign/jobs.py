"""Training jobs that know nothing of Penstock; tests run them under `penstock trace`.

    python jobs.py CASE FOLDER

Each prints what it was given, as JSON, for the test to compare with the trace.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

NUM_FILES = 24
SAMPLE_BYTES = 5000
BATCH = 4


class Files(Dataset):
    """One file a sample, of different sizes; the first bytes say which."""

    def __init__(self, folder: str, kill_at: int = -1) -> None:
        self.folder, self.kill_at = folder, kill_at

    def __len__(self) -> int:
        return NUM_FILES

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if index == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        data = Path(self.folder, "files", f"{index}.bin").read_bytes()
        worker = get_worker_info()
        return index, len(data), -1 if worker is None else worker.id


class Shard(Dataset):
    """One file of all samples, read at offsets."""

    def __init__(self, folder: str) -> None:
        self.path = str(Path(folder, "shard.bin"))
        self.file = None

    def __len__(self) -> int:
        return NUM_FILES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        data = os.pread(self.file, SAMPLE_BYTES, index * SAMPLE_BYTES)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Archives(Dataset):
    """One npz a sample."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with np.load(Path(self.folder, f"{index}.npz")) as archive:
            return torch.from_numpy(archive["x"])


class Mapped(Dataset):
    """An array that is mapped, not read."""

    def __init__(self, folder: str) -> None:
        self.array = np.load(Path(folder, "array.npy"), mmap_mode="r")

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.array[index]))


class Stream(IterableDataset):
    """Every worker reads its share of the shard from front to back."""

    def __init__(self, folder: str) -> None:
        self.path = str(Path(folder, "shard.bin"))

    def __iter__(self):
        worker = get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        with open(self.path, "rb", buffering=0) as file:
            for index in range(first, NUM_FILES, step):
                file.seek(index * SAMPLE_BYTES)
                yield torch.frombuffer(bytearray(file.read(SAMPLE_BYTES)), dtype=torch.uint8)


def make(folder: str) -> None:
    Path(folder, "files").mkdir(parents=True)
    for index in range(NUM_FILES):
        Path(folder, "files", f"{index}.bin").write_bytes(bytes([index]) * (1000 + 37 * index))
    shard = np.arange(NUM_FILES * SAMPLE_BYTES, dtype=np.uint32).astype(np.uint8)
    Path(folder, "shard.bin").write_bytes(shard.tobytes())
    np.save(Path(folder, "array.npy"), np.zeros((8, 1000), np.float32))
    for index in range(4):
        np.savez(Path(folder, f"{index}.npz"), x=np.full(20_000, index))


def count_files(loader: DataLoader, epochs: int) -> dict[str, list[int]]:
    """Return the bytes that each worker delivered, by epoch."""
    out: dict[str, list[int]] = {}
    for epoch in range(epochs):
        for _, sizes, workers in loader:
            for size, worker in zip(sizes.tolist(), workers.tolist(), strict=True):
                out.setdefault(str(worker), [0] * epochs)[epoch] += size
    return out


def many(folder: str) -> dict:
    """All ways of loading that start no other interpreter, one after the other."""
    options = {"batch_size": BATCH}
    got = {
        "fork": count_files(DataLoader(Files(folder), shuffle=True, num_workers=2, **options), 2),
        "persistent": count_files(
            DataLoader(Files(folder), num_workers=1, persistent_workers=True, **options), 2
        ),
        "main": count_files(DataLoader(Files(folder), num_workers=0, **options), 1),
    }
    for name, kind, workers in (
        ("shard", Shard, 1), ("stream", Stream, 2), ("npz", Archives, 0), ("mapped", Mapped, 0),
    ):  # fmt: skip
        loader = DataLoader(kind(folder), num_workers=workers, **options)
        got[name] = sum(batch.nbytes for batch in loader)
    return got


def started(folder: str) -> dict:
    """Workers that are interpreters of their own."""
    return {
        method: count_files(
            DataLoader(
                Files(folder), batch_size=BATCH, num_workers=1, multiprocessing_context=method
            ),
            1,
        )
        for method in ("spawn", "forkserver")
    }


def killed(folder: str) -> dict:
    """A worker is killed in the middle."""
    num_batches = 0
    try:
        for _ in DataLoader(Files(folder, kill_at=18), batch_size=BATCH, num_workers=1):
            num_batches += 1
    except (RuntimeError, OSError, EOFError) as error:  # Whichever torch comes upon first.
        return {"batches": num_batches, "error": str(error)}
    return {"batches": num_batches}


def plain(folder: str) -> dict:
    """One pass in the training process."""
    return {"batches": sum(1 for _ in DataLoader(Files(folder), batch_size=BATCH))}


def ranks(folder: str) -> dict:
    """Two ranks train, validate, and save."""
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    train = Shard(folder)
    loader = DataLoader(train, batch_size=2, sampler=DistributedSampler(train))
    checks = DataLoader(Archives(folder), batch_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(SAMPLE_BYTES, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch.float()).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for _ in checks:
                pass
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), Path(folder, "checkpoint.pt"))
        dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    return {"rank": rank}


if __name__ == "__main__":
    case, place = sys.argv[1:]
    sys.stdout.write(json.dumps(globals()[case](place)) + "\n")
