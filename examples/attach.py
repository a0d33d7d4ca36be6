"""Data-parallel training of an ordinary loop: one line attaches the model, the loop stays.

    torchrun --nproc-per-node 2 examples/attach.py
    python examples/attach.py             # starts two ranks itself

Gradients are reduced while backward still runs, each rank updates its part of the weights, and
they are gathered while the next forward waits for them layer by layer. In the end the same steps
are made by one process on whole batches, from the checkpoint in the middle, and compared.
"""

import io
import os
import subprocess
import sys

import torch
from torch import distributed, nn

import penstock.step as ps

STEPS, BATCH, WIDTH = 40, 32, 64


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, size: int
) -> None:
    """The loop, as it would be on one process."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, WIDTH, generator=generator).chunk(size)[rank]
        optimizer.zero_grad()
        (model(batch) - batch[:, :1].sin()).square().mean().backward()
        optimizer.step()


def main() -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()

    model, optimizer = make()
    attached = ps.attach(model, optimizer)
    train(model, optimizer, range(STEPS // 2), rank, size)

    # Both are whole, so one process can go on from here. All ranks ask; one could write a file.
    checkpoint = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], checkpoint)
    checkpoint.seek(0)

    train(model, optimizer, range(STEPS // 2, STEPS), rank, size)
    attached.synchronize()

    if rank == 0:
        alone, its_optimizer = make()
        for each, state in zip((alone, its_optimizer), torch.load(checkpoint), strict=True):
            each.load_state_dict(state)
        train(alone, its_optimizer, range(STEPS // 2, STEPS), 0, 1)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
        print(f"{size} ranks, {STEPS} steps: weights as on one process: {apart < 1e-4}")
        print(f"sent {attached.sent_bytes / STEPS / 1e3:.0f} kB a step and rank")
    distributed.barrier()
    attached.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--standalone", __file__]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        sys.exit(subprocess.run(command, env=env, check=False).returncode)
