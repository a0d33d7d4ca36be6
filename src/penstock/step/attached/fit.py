"""Whether a model, an optimizer and a job fit together: mistakes that would train in silence.

Of a model and an optimizer these are no mistakes: parameters that are frozen, parameters of an
optimizer that the model does not have (those of a loss), and several optimizers for one model, if
all of them are attached. What gets gradients and is in none of them is warned of in the first step:
nobody reduces it, so each rank updates it alone.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from penstock.errors import OptionError, StateError
from penstock.step.attached.compiled import is_compiled
from penstock.step.comms.checks import WIRES
from penstock.step.program.mesh import Mesh

__all__ = [
    "attachable",
    "axis_of",
    "changed",
    "check_fit",
    "check_groups",
    "check_norms",
    "check_options",
    "check_reshard",
    "everyone",
    "group_numbers",
    "moved",
    "no_join",
    "warn_of_strangers",
]

Group = Mapping[str, Any]
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
)
"""Modules that send gradients themselves, by where they are defined."""
_NAMES_MAX = 3
"""Parameters that a message names."""


def attachable(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that need gradients."""
    params = []
    for group in optimizer.param_groups:
        mine = [param for param in group["params"] if param.requires_grad]
        kinds = {param.dtype for param in mine if param.numel()}
        # Of nothing there are no slices.
        params += [param for param in mine if param.dtype in kinds]
    if not params:
        raise OptionError("no parameter of the optimizer needs gradients; nothing to attach")
    for param in params:
        if not param.is_floating_point():
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} is {param.dtype}; attach knows real "
                "numbers"
            )
    return params


def check_fit(
    model: nn.Module,
    optimizer: Optimizer,
    params: Sequence[torch.Tensor],
    taken: Collection[torch.Tensor],
) -> None:
    """Refuse what would not be trained, or be trained twice; `taken` parameters are attached."""
    _refuse_wrappers(model)
    names = _names(model)
    for param in [*names, *params]:
        if _is_sharded(param):
            raise OptionError(
                f"parameter {names.get(param, 'of the optimizer')!r} is a DTensor: fully_shard or "
                "parallelize_module keeps it in slices already; attach the model without them, "
                "with reshard=True to keep weights in slices"
            )
    if any(param in taken for param in params):
        raise StateError(
            "parameters of this optimizer are attached already; close() the attached one first"
        )
    if not any(param in names for param in params):
        raise OptionError(
            f"no parameter of the {type(optimizer).__name__} is one of the model's that need "
            "gradients: the model would not be trained; make the optimizer from "
            "model.parameters() of the model that is attached"
        )


def warn_of_strangers(model: nn.Module, attached: Collection[torch.Tensor]) -> None:
    """Warn of parameters of a model that have gradients and are not attached."""
    found = [
        name
        for param, name in _names(model).items()
        if param.grad is not None and param not in attached and param.numel()
    ]
    if found:
        more = f" and {len(found) - _NAMES_MAX} more" if len(found) > _NAMES_MAX else ""
        warnings.warn(
            f"parameters {', '.join(map(repr, found[:_NAMES_MAX]))}{more} have gradients and are "
            "in no attached optimizer: their gradients are those of each rank alone; attach their "
            "optimizer as well, or freeze them with requires_grad_(False)",
            stacklevel=2,
        )


def everyone() -> Mesh:
    """Return a mesh of all ranks of the job; one, where there is no job."""
    if distributed.is_available() and distributed.is_initialized():
        return Mesh(axes=(("dp", distributed.get_world_size()),))
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdecimal() and int(said) > 1:
        raise OptionError(
            f"WORLD_SIZE is {said} and there is no process group: each process would train a model "
            "of its own; call torch.distributed.init_process_group() before attach, or pass "
            "mesh=ps.mesh(dp=1) if it shall"
        )
    return Mesh(axes=(("dp", 1),))


def check_groups(
    groups: Sequence[Group], numbers: Mapping[torch.Tensor, int], first: Mapping[int, int]
) -> None:
    """Raise if groups of an optimizer are not what they were when it was attached."""
    for group in groups:
        for param in group["params"]:
            if param not in numbers and param.grad is not None and param.numel():
                raise StateError(
                    f"a parameter of shape {tuple(param.shape)} has a gradient and was not "
                    "attached: it was added, or frozen, when attach was called; close the "
                    "attached one and attach again"
                )
    if (found := group_numbers(groups, numbers)) != first:
        raise StateError(
            "parameters were moved between groups of the optimizer, or taken out of it, after "
            f"attach ({len(found)} of {len(first)} are there); close the attached one and attach "
            "again"
        )


def group_numbers(groups: Sequence[Group], numbers: Mapping[torch.Tensor, int]) -> dict[int, int]:
    """Return which group each attached parameter is in, by number."""
    return {
        numbers[param]: place
        for place, group in enumerate(groups)
        for param in group["params"]
        if param in numbers
    }


def changed(number: int, param: torch.Tensor) -> StateError:
    """Return what is raised where a gradient was changed after backward."""
    return StateError(
        f"the gradient of parameter {number} of shape {tuple(param.shape)} was changed "
        "after backward, when it was on its way to other ranks; to clip gradients, "
        "attach with clip=, to change them, run backward in attached.accumulate()"
    )


def moved(before: torch.Tensor, param: torch.Tensor) -> StateError:
    """Return what is raised where a parameter has another type, shape or device than before."""
    return StateError(
        f"a parameter of shape {tuple(before.shape)} and {before.dtype} on {before.device} is now "
        f"of shape {tuple(param.shape)} and {param.dtype} on {param.device}; call model.to(...) "
        "before attach, or close() the attached one and attach again"
    )


def check_options(clip: float | None, wire: str | None, dtype: torch.dtype | None) -> None:
    """Refuse options of `attach` that make no sense."""
    if clip is not None and not clip > 0:
        raise OptionError(f"clip must be a norm above 0, got {clip}")
    if wire is not None and wire not in WIRES:
        raise OptionError(f"no wire {wire!r}; there are {', '.join(WIRES)}")
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
        raise OptionError(f"dtype {dtype}: compute in bfloat16 or float16, or leave it out")


def check_norms(max_norm: float, norm_type: float) -> None:
    """Refuse norms that clip everything, or that are none."""
    if not (max_norm > 0 and norm_type > 0):
        raise OptionError(
            f"clip_grad_norm_({max_norm}, {norm_type}): both must be above 0; to clip nothing "
            "and only know the norm, max_norm is float('inf')"
        )


def no_join() -> OptionError:
    """Return what is raised where torch's Join is asked to follow ranks without batches."""
    return OptionError(
        "torch's Join does not know attached models, where every rank updates its slices in "
        "every step; stop all ranks at the same step: drop the last batches of those that have "
        "more, or all_reduce whether any rank has none left"
    )


def check_reshard(model: nn.Module) -> None:
    """Refuse to keep weights in slices where compiled code would read them."""
    if any(is_compiled(module) for module in model.modules()):
        raise OptionError(
            "reshard of a compiled model: its code would read weights that are away; attach with "
            "reshard what is not compiled"
        )


def axis_of(mesh: Mesh, clip: float | None) -> str:
    """Return the axis of ranks that share a model."""
    if len(mesh.axes) == 1:
        return mesh.names[0]
    if "dp" not in mesh.names:
        raise OptionError(f"which axis of {mesh} shares a model? attach takes the one named 'dp'")
    if clip is not None and mesh.num_ranks > mesh.size("dp"):
        raise OptionError(
            f"clip on {mesh}: the norm would cover this rank's part of the model only; clip needs "
            "a mesh with the axis 'dp' alone"
        )
    return "dp"


def _refuse_wrappers(model: nn.Module) -> None:
    kinds = [getattr(sys.modules.get(where), name, ()) for where, name in _WRAPPERS]
    for name, module in model.named_modules():
        for kind in kinds:
            if isinstance(module, kind):
                place = f"module {name!r}" if name else "the model"
                raise OptionError(
                    f"{place} is a {type(module).__name__}, which reduces gradients itself; attach "
                    "the plain module, before it is wrapped or instead"
                )


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def _is_sharded(param: torch.Tensor) -> bool:
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(param, dtensor) or isinstance(param.data, dtensor)
