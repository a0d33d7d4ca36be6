"""Resumption with trainers that save only the number of their step.

Lightning saves a loader's own state; Accelerate does if the loader is registered. Hugging Face's
Trainer saves a count of optimizer steps; on resume it reads and drops all batches before that. The
order is a function, so the count is enough to put the loader there at once. Importance sampling
depends on losses as well, so there the loader's state is saved in a file beside the Trainer's own.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import count_of
from penstock.errors import MissingPackageError, OptionError, StateError
from penstock.loader.loader import Loader
from penstock.order import Steps

_log = logging.getLogger("penstock.torch")

_STATE_FILE = "penstock_loader.pt"


def seek(loader: Loader, *, epoch: int, step: int) -> None:
    """Begin the next iteration behind `step` batches of an epoch."""
    epoch, step = count_of("epoch", epoch, least=0), count_of("step", step, least=0)
    world = loader.world
    steps = Steps(
        num_samples=loader.order.num_samples,
        global_batch_size=loader.global_batch_size or (loader.batch_size or 0) * world.num_ranks,
        num_ranks=world.num_ranks,
        drop_last=loader.drop_last,
    )
    if step >= steps.steps_per_epoch:
        raise OptionError(
            f"there is no step {step} in epoch {epoch}: an epoch has {steps.steps_per_epoch} steps "
            f"of {steps.global_batch_size} samples, both count from 0"
        )
    place = {"epoch": epoch, "position": steps.position_after(step)}
    loader.load_state_dict({**loader.state_dict(), **place})


def resume_callback(checkpoint: str | os.PathLike[str] | None = None) -> Any:
    """Return a callback that resumes the loader of a `transformers.Trainer`.

    The trainer's `get_train_dataloader` must return a `penstock.Loader` with `epochs=1`, and its
    arguments must have `ignore_data_skip=True`; then used batches are not read again. With
    `shuffle=penstock.Importance(…)` the callback also saves the scores with each checkpoint, and
    finds them in `output_dir`; give `checkpoint` if the run resumes from another folder.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError("resume_callback", "transformers", "hf") from error
    actions = {"on_train_begin": _resume, "on_save": _save, "checkpoint": checkpoint}
    made = type("ResumeLoader", (transformers.TrainerCallback,), actions)
    return made()


def _resume(
    callback: Any, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any
) -> None:
    loader = train_dataloader
    if not isinstance(loader, Loader):
        raise OptionError(
            f"the trainer reads from a {type(loader).__name__}: resume_callback is for one whose "
            "get_train_dataloader returns a penstock.Loader"
        )
    if loader.epochs != 1:
        raise OptionError(
            f"the trainer counts epochs, and each would be {loader.epochs} of the loader's; make "
            "the loader with epochs=1"
        )
    if state.global_step == 0:
        return
    if not args.ignore_data_skip:
        raise OptionError(
            f"the trainer would skip what {state.global_step} steps have used, and the loader is "
            "already past it; set ignore_data_skip=True in TrainingArguments"
        )
    accumulated = args.gradient_accumulation_steps
    epoch, update = divmod(state.global_step, -(-len(loader) // accumulated))
    if update and len(loader) % accumulated:
        _log.warning(
            "an epoch of %d batches is no multiple of gradient_accumulation_steps=%d: in the epoch "
            "that is resumed, the trainer leaves out its last optimizer step",
            len(loader),
            accumulated,
        )
    if loader.importance is None:
        seek(loader, epoch=epoch, step=update * accumulated)
    else:
        folder = callback.checkpoint or _folder_of(args, state)
        loader.load_state_dict(_saved_state(Path(folder) / _STATE_FILE, state))


def _save(
    callback: Any, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any
) -> None:
    loader = train_dataloader
    if not isinstance(loader, Loader) or loader.importance is None or not args.should_save:
        return
    folder = _folder_of(args, state)
    if not folder.exists():
        raise StateError(
            f"the trainer has saved step {state.global_step} somewhere else than in {folder}, so "
            "the scores of the loader's samples have no place; searches of hyperparameters cannot "
            "be resumed with importance sampling: leave resume_callback out of them"
        )
    saved = {"run": _run_of(state), "loader": loader.state_dict()}
    torch.save(saved, folder / _STATE_FILE)


def _saved_state(path: Path, state: Any) -> Any:
    way_out = "give the folder that the trainer resumes from, resume_callback(checkpoint=…)"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise StateError(
            f"there is no {path}, where the scores of step {state.global_step} should be: {way_out}"
        ) from None
    if saved["run"] != _run_of(state):
        raise StateError(
            f"{path} belongs to another run than the one that the trainer resumes at step "
            f"{state.global_step}: {way_out}"
        )
    return saved["loader"]


def _folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _run_of(state: Any) -> str:
    """Return a text that differs from that of the same step of another run."""
    return json.dumps([state.global_step, state.log_history], sort_keys=True)
