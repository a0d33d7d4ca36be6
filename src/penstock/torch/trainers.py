"""For trainers that remember a loader by nothing but the number of their step.

Lightning saves a loader's own state, Accelerate does when it is registered. Hugging Face's Trainer
keeps a count of optimizer steps and, on resume, reads and throws away everything before it. As the
order is a function, the count is enough: the loader can be put there at once.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from penstock.arguments import count_of
from penstock.errors import MissingPackageError, OptionError
from penstock.loader import Loader
from penstock.order import Steps

_log = logging.getLogger("penstock.torch")


def seek(loader: Loader, *, epoch: int, step: int) -> None:
    """Let the next iteration begin where so many batches of an epoch have been used."""
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


def resume_callback() -> Any:
    """Return a callback that puts the loader of a `transformers.Trainer` where it was saved.

    For a trainer whose `get_train_dataloader` returns a `penstock.Loader`, with `epochs=1`, and
    whose arguments have `ignore_data_skip=True`: what was used is not read again.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError("resume_callback", "transformers", "hf") from error
    made = type("ResumeLoader", (transformers.TrainerCallback,), {"on_train_begin": _resume})
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
    seek(loader, epoch=epoch, step=update * accumulated)
