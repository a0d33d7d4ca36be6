"""Accelerate with `attach` in the place of DDP: another class of Accelerator, the loop stays.

    torchrun --nproc-per-node 2 examples/attach_accelerate.py
    torchrun --nproc-per-node 2 examples/attach_accelerate.py --ddp     # the same losses

    torchrun --nproc-per-node 2 examples/attach_accelerate.py --folder /tmp/acc --epochs 2
    torchrun --nproc-per-node 3 examples/attach_accelerate.py --folder /tmp/acc --epochs 3

The last one goes on from the state that the one before it has saved, on another number of ranks.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import penstock.step as ps

GLOBAL_BATCH = 12


def main(folder: Path | None, epochs: int, ddp: bool) -> None:
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    accelerator = (Accelerator if ddp else ps.AttachAccelerator)(
        cpu=not has_gpu, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    x = torch.randn(480, 16)
    data = DataLoader(TensorDataset(x, x.sin()), GLOBAL_BATCH // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, 1, 0.5)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    if folder is not None and folder.exists():
        accelerator.load_state(folder)

    for epoch in range(scheduler.scheduler.last_epoch, epochs):
        losses = []
        for x, y in data:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        scheduler.step()
        mean = accelerator.gather(torch.stack(losses)).mean()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    if folder is not None:
        accelerator.save_state(folder)
    accelerator.free_memory()  # the model is a plain one again
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ddp", action="store_true")
    main(**vars(parser.parse_args()))
