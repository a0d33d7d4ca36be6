"""How much memory does a training step need: `attach`, its weights in slices, FSDP2 and DDP?

    python -m benchmarks.step_memory [--ranks 2] [--layers 16] [--only attach,FSDP2]

Ranks are processes of this host, in new ones for each way. A model of square layers trains with
AdamW on small batches, so weights, gradients and states are what counts. Memory is what a process
has resident beyond what it had before there was a model: the most within some steps, and what is
left after them; of the larger rank, in models of float32. What ranks share counts in each of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.compare import conditions
from penstock.step.attached.attach import attach
from penstock.testing.ports import HOST, free_ports

ROOT = Path(__file__).parents[1]
WAYS = ("DDP", "attach", "attach over sockets", "attach reshard", "FSDP2")
WIDTH, BATCH = 1024, 8
FIRST_STEPS, STEPS = 3, 5
RUN_S = 300


def resident_bytes(name: str) -> int:
    """Return what /proc says of this process: VmRSS now, VmHWM the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no {name} here")


def made(way: str, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return what one way trains; the last is what has to be kept."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )
    if way == "FSDP2":
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way == "DDP":
        return nn.parallel.DistributedDataParallel(model), optimizer, None
    if way == "FSDP2":
        return model, optimizer, None
    if way.endswith("sockets"):
        import penstock.step as ps

        ranks = ps.Groups(ps.mesh(dp=distributed.get_world_size()), backend="gloo")
        return model, optimizer, attach(model, optimizer, ranks)
    return model, optimizer, attach(model, optimizer, reshard="reshard" in way)


def be_rank(way: str, layers: int) -> None:
    """Be one rank; the first says what the larger one has."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    x = torch.randn(BATCH, WIDTH)
    warm = nn.Linear(8, 8)  # what torch loads in its first step is no memory of a model
    optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
    warm(x[:, :8]).sum().backward()
    optimizer.step()
    gc.collect()
    before = resident_bytes("VmRSS")
    model, optimizer, attached = made(way, layers)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    for _ in range(FIRST_STEPS):
        step()
    if attached is not None:
        attached.synchronize()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(STEPS):
        step()
    if attached is not None:
        attached.synchronize()
    most, left = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    found = torch.tensor([most, left], dtype=torch.float64)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    if distributed.get_rank() == 0:
        print(json.dumps(found.tolist()), flush=True)
    distributed.barrier()
    os._exit(0)


def measured(way: str, options: argparse.Namespace) -> list[float]:
    """Return the most and what is left, in bytes."""
    env = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": HOST, "OMP_NUM_THREADS": "1"}
    # What is freed is given back at once, so that resident memory is memory in use.
    env |= {"MASTER_PORT": str(free_ports(1)[0]), "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = ["--way", way, "--layers", str(options.layers)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step_memory", *words],
            env=os.environ | env | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(options.ranks)
    ]
    said = [each.communicate(timeout=RUN_S)[0] for each in ranks]
    assert not any(each.returncode for each in ranks), f"a rank of {way} has failed"
    found: list[float] = json.loads(said[0].splitlines()[-1])
    return found


def main() -> None:
    """Measure all ways, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--only", default="", help="ways that begin so, for example attach,FSDP2")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        be_rank(options.way, options.layers)
    model_bytes = 4 * options.layers * WIDTH * (WIDTH + 1)
    print(f"{__doc__.splitlines()[0]}\n{conditions()}\n{options.ranks} ranks, one host\n")
    print("| way | most, models | after a step, models |\n|---|---:|---:|")
    for way in WAYS:
        if not options.only or any(way.startswith(word) for word in options.only.split(",")):
            most, left = (each / model_bytes for each in measured(way, options))
            print(f"| {way} | {most:.2f} | {left:.2f} |", flush=True)


if __name__ == "__main__":
    main()
