"""Train on documents that are tokenized in plain Python, in a background thread or in workers."""

import argparse
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--num-samples", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--workers", choices=["threads", "processes"], default="threads")
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--rounds", type=int, default=1000, help="bytes of a document")
parser.add_argument("--kernels", type=int, default=1, help="operations that are waited for")
parser.add_argument("--step-ms", type=float, default=0, help="the accelerator's time for a step")


class Documents(Dataset):
    """Documents by number, tokenized."""

    def __init__(self, num_samples: int, rounds: int) -> None:
        self.num_samples, self.rounds = num_samples, rounds
        self.text = random.Random(7).randbytes(rounds)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        words: dict[int, int] = {}
        for value in self.text:
            words[value] = words.get(value, 0) + len(str(value))
        return torch.tensor([index, len(words)])


class Ahead(IterableDataset):
    """Batches that a background thread makes ahead of the training loop."""

    def __init__(self, documents: Documents, batch_size: int) -> None:
        self.documents, self.batch_size = documents, batch_size

    def batch(self, start: int) -> torch.Tensor:
        return torch.stack([self.documents[start + i] for i in range(self.batch_size)])

    def __iter__(self) -> Iterator[torch.Tensor]:
        starts = range(0, len(self.documents) - self.batch_size + 1, self.batch_size)
        with ThreadPoolExecutor(1) as pool:
            made = [pool.submit(self.batch, start) for start in starts[:2]]
            for start in [*starts[2:], None, None]:
                yield made.pop(0).result()
                if start is not None:
                    made.append(pool.submit(self.batch, start))


def loader_of(args: argparse.Namespace) -> DataLoader:
    documents = Documents(args.num_samples, args.rounds)
    if args.workers == "threads":
        return DataLoader(Ahead(documents, args.batch_size), batch_size=None)
    return DataLoader(documents, args.batch_size, drop_last=True, num_workers=args.num_workers)


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.zeros(64)
    begin_s, steps = 0.0, 0
    for _ in range(args.epochs):
        for _batch in loader_of(args):
            for _ in range(args.kernels):
                state = torch.tanh(state + 1)
                # The accelerator computes, the host waits for it, and needs the lock to go on.
                time.sleep(args.step_ms / 1000 / args.kernels)
            steps += 1
            # The first step waits for the workers to start.
            begin_s = begin_s or time.perf_counter()
    seconds = time.perf_counter() - begin_s
    print(json.dumps({"samples_s": (steps - 1) * args.batch_size / seconds, "seconds": seconds}))


if __name__ == "__main__":
    main()
