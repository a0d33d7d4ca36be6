"""Hugging Face's Trainer on one rank, with DDP and with `attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.trainers.work import GLOBAL_BATCH, STEPS, HeadedNet, samples, weights
from tests.step.trainers.worlds import as_under_torchrun
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import penstock.step as ps
from penstock.errors import OptionError

KINDS = ("ddp", "attach")


class AttachTrainer(ps.AttachMixin, Trainer):
    pass


def trainer(kind: str, model: Any, folder: Path, size: int, **options: Any) -> Trainer:
    told: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_steps": 1}
    told |= {"max_steps": STEPS, "gradient_accumulation_steps": 2, "learning_rate": 0.05}
    told |= {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    told |= {"per_device_train_batch_size": GLOBAL_BATCH // size}
    told |= {"use_cpu": True, "label_names": ["y"], "save_steps": STEPS // 2}
    args = TrainingArguments(output_dir=str(folder / kind), **(told | options))
    made = {"ddp": Trainer, "attach": AttachTrainer}[kind]
    return made(model, args, train_dataset=samples(), eval_dataset=samples(17))


def logged(trained: Trainer) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{n: float(row[n]) for n in names if n in row} for row in trained.state.log_history]


def trained_both_ways(rank: int, size: int, folder: Path) -> list[Any]:
    """Train to the end, evaluating and saving; save once more after it."""
    as_under_torchrun(rank, size)
    said = []
    for kind in KINDS:
        model = HeadedNet()
        made = trainer(kind, model, folder, size, max_grad_norm=0.5)
        made.train()
        made.save_model(str(folder / kind / "last"))
        if rank == 0:  # as users do, who save by hand
            torch.save([model.state_dict(), made.optimizer.state_dict()], folder / f"{kind}.pt")
        after = made.evaluate()["eval_loss"]
        made.accelerator.wait_for_everyone()
        said.append((logged(made), after, weights(model)))
    return said


def resumed(rank: int, size: int, folder: Path) -> torch.Tensor:
    """Go on from the checkpoint in the middle."""
    as_under_torchrun(rank, size)
    model = HeadedNet()
    made = trainer("attach", model, folder, size, max_grad_norm=0.5, save_strategy="no")
    made.train(resume_from_checkpoint=str(folder / "attach" / f"checkpoint-{STEPS // 2}"))
    return weights(model)


def one_process_for_two_gpus(rank: int, size: int) -> None:
    as_under_torchrun(rank, size)
    args = TrainingArguments(use_cpu=True)
    args._n_gpu = 2
    with pytest.raises(OptionError, match="torchrun --nproc-per-node 2"):
        AttachTrainer(HeadedNet(), args)


def language_models(rank: int, size: int, folder: Path) -> Any:
    """Train one with tied weights and weights in slices, and one with DDP."""
    as_under_torchrun(rank, size)
    AttachTrainer.attach_options = {"reshard": True}
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (32, 9), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in ids]
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    said = []
    for kind in KINDS:
        torch.manual_seed(5)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
        made = trainer(kind, model, folder, size, max_grad_norm=0.0, learning_rate=1e-3)
        made.train_dataset = made.eval_dataset = data
        made.train()
        made.save_model(str(folder / kind / "last"))
        made.accelerator.wait_for_everyone()
        again = GPT2LMHeadModel.from_pretrained(folder / kind / "last")
        said.append((logged(made), weights(model), torch.equal(weights(again), weights(model))))
    return said
