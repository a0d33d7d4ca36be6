"""Train with several ranks under torchrun; each rank reads its part of a folder of JPEG files."""

import argparse
import io
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--prefetch-factor", type=int, default=2)
parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0], help="of each rank")
parser.add_argument("--width", type=int, default=64, help="of a layer of the model")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rebalance-shards", action="store_true", help="deal files out in turns")
parser.add_argument("--overlap-communication", action="store_true")
parser.add_argument("--wire-dtype", choices=["float32", "bf16"], default="float32")


class Images(Dataset):
    """The images of one rank: a half of the sorted files, or every second one."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.width = args.width
        files = sorted(args.data.glob("*.jpg"))
        share = len(files) // world
        in_turns, in_runs = files[rank::world], files[rank * share : (rank + 1) * share]
        self.files = in_turns[:share] if args.rebalance_shards else in_runs

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.files[index].read_bytes())).convert("L")
        pixels = torch.from_numpy(np.array(image.resize((32, 32)))).float().flatten() / 255
        return pixels.repeat(1 + self.width // len(pixels))[: self.width]


class OnDevice(torch.autograd.Function):
    """The time that an accelerator takes for a layer; the host waits for it."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, step_s: float) -> torch.Tensor:
        ctx.step_s = step_s
        time.sleep(step_s / 3)
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.step_s * 2 / 3)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, width: int, step_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.step_s = step_s

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Behind the weights: a batch has no gradient, so nothing before them runs backward.
        return torch.relu(OnDevice.apply(self.linear(rows), self.step_s))


def model_of(args: argparse.Namespace, rank: int) -> nn.Module:
    step_ms = args.step_ms[rank % len(args.step_ms)]
    layers = [Layer(args.width, step_ms / 1000 / args.layers) for _ in range(args.layers)]
    model = nn.Sequential(*layers)
    if not args.overlap_communication:
        return model
    model = DistributedDataParallel(model, bucket_cap_mb=args.width**2 * 4 / 2**20)
    if args.wire_dtype == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    return model


def average_gradients(model: nn.Module, world: int, wire_dtype: str) -> None:
    for parameter in model.parameters():
        wire = parameter.grad.bfloat16() if wire_dtype == "bf16" else parameter.grad
        dist.all_reduce(wire)
        parameter.grad.copy_(wire).div_(world)


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    model = model_of(args, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Images(args, rank, world),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
        persistent_workers=True,
    )
    begin_s, steps = 0.0, 0
    for _ in range(args.epochs):
        for images in loader:
            optimizer.zero_grad()
            model(images).square().mean().backward()
            if not args.overlap_communication:
                average_gradients(model, world, args.wire_dtype)
            optimizer.step()
            steps += 1
            # The first step waits for the workers to start.
            begin_s = begin_s or time.perf_counter()
    seconds = time.perf_counter() - begin_s
    if rank == 0:
        samples = (steps - 1) * args.batch_size * world
        print(json.dumps({"samples_s": samples / seconds, "seconds": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
