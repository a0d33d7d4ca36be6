"""Train a recommender: each feature of a row goes through a small network of its own."""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--num-samples", type=int, default=512)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--features", type=int, default=100)
parser.add_argument("--width", type=int, default=8, help="of a feature")
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--prefetch-factor", type=int, default=2)
parser.add_argument("--step-ms", type=float, default=0, help="the accelerator's time for a step")
parser.add_argument("--compile-step", action="store_true", help="all features in one operation")


class Towers(nn.Module):
    """One small layer for each feature, one after the other."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(width, width) for _ in range(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = [torch.relu(tower(rows[:, i])) for i, tower in enumerate(self.towers)]
        return torch.stack(out, 1)


class FusedTowers(nn.Module):
    """The same layers as one batched product."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width, width) / width)
        self.bias = nn.Parameter(torch.zeros(features, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.einsum("bfi,fio->bfo", rows, self.weight) + self.bias)


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = (FusedTowers if args.compile_step else Towers)(args.features, args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.randn(args.num_samples, args.features, args.width))
    loader = DataLoader(
        rows,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
        persistent_workers=True,
    )
    begin_s, steps = 0.0, 0
    for _ in range(args.epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(args.step_ms / 1000)  # The accelerator computes, the host waits for it.
            steps += 1
            # The first step waits for the workers to start.
            begin_s = begin_s or time.perf_counter()
    seconds = time.perf_counter() - begin_s
    print(json.dumps({"samples_s": (steps - 1) * args.batch_size / seconds, "seconds": seconds}))


if __name__ == "__main__":
    main()
