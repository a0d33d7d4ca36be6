"""Hugging Face's Trainer: give it a loader, and a callback that puts it where it was.

    torchrun --nproc-per-node 2 examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py --folder /tmp/hf --stop-after 25
    torchrun --nproc-per-node 2 examples/hf_trainer.py --folder /tmp/hf

`get_train_dataloader` returns the loader as it is: what the Trainer would make of a data set is
split among ranks a second time, or read by one rank for all. With `ignore_data_skip` nothing is
read only to be thrown away when a run goes on: the callback finds the place by the step's number.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import penstock
from penstock.torch import resume_callback

EPOCHS, BATCH_SIZE = 3, 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(data[:, 1:]) - data[:, :1]).square().mean()}


class LoaderTrainer(Trainer):
    def get_train_dataloader(self) -> penstock.Loader:
        dataset = penstock.open(Path(self.args.output_dir) / "data")
        return penstock.Loader(dataset, batch_size=BATCH_SIZE, seed=7, drop_last=True)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
        log = Path(self.args.output_dir) / f"ids-{self.args.process_index}.jsonl"
        with log.open("a") as file:
            file.write(json.dumps([inputs.epoch, inputs.step, inputs.ids.tolist()]) + "\n")
        return super().training_step(model, inputs, *args)


def main(folder: Path, stop_after: int) -> None:
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        max_steps=stop_after,
        per_device_train_batch_size=BATCH_SIZE,
        save_steps=10,
        ignore_data_skip=True,
        use_cpu=True,
    )
    with args.main_process_first():
        if not (folder / "data").exists():
            (folder / "data").mkdir(parents=True)
            rows = np.random.default_rng(0).normal(size=(1000, 17)).astype(np.float32)
            np.save(folder / "data" / "rows.npy", rows)
    trainer = LoaderTrainer(Model(), args, callbacks=[resume_callback()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    if trainer.is_world_process_zero() and stop_after < 0:
        lines = {line for log in folder.glob("ids-*") for line in log.read_text().splitlines()}
        print(sum(len(json.loads(line)[2]) for line in lines), "samples", flush=True)
    # torch's gloo threads drop their last work with the interpreter's lock held. A group that is
    # destroyed before they have done so waits for them with that lock, for ever.
    time.sleep(0.5)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=f"{tempfile.gettempdir()}/hf-{os.getppid()}")
    parser.add_argument("--stop-after", type=int, default=-1)
    main(**vars(parser.parse_args()))
