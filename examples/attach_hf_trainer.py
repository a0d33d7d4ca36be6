"""Hugging Face's Trainer with `attach` in the place of DDP: one base class more, the rest stays.

    torchrun --nproc-per-node 2 examples/attach_hf_trainer.py
    torchrun --nproc-per-node 2 examples/attach_hf_trainer.py --ddp     # the same losses

    torchrun --nproc-per-node 2 examples/attach_hf_trainer.py --folder /tmp/hf --steps 20
    torchrun --nproc-per-node 3 examples/attach_hf_trainer.py --folder /tmp/hf --steps 30

The last one goes on from the checkpoint of the one before it, on another number of ranks.
"""

import argparse
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import penstock.step as ps

GLOBAL_BATCH = 12


class AttachTrainer(ps.AttachMixin, Trainer):
    attach_options: ClassVar = {"reshard": True}  # weights in slices as well, to save memory


def main(folder: Path | None, steps: int, ddp: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # or runs would differ
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    texts = (torch.arange(240)[:, None] + torch.arange(16)) % 64  # they count
    folder = folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=10,
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    args.per_device_train_batch_size = GLOBAL_BATCH // args.world_size
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = (Trainer if ddp else AttachTrainer)(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model()  # it is a plain model again
    if trainer.is_world_process_zero():
        losses = [f"{row['loss']:.3f}" for row in trainer.state.log_history if "loss" in row]
        print(f"{trainer.state.global_step} steps, losses {', '.join(losses)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ddp", action="store_true")
    main(**vars(parser.parse_args()))
