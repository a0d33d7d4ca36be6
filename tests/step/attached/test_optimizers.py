"""Programs of optimizers mean what torch's optimizers do, on any number of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from penstock.errors import OptionError
from penstock.step.attached.optimizers import LAMB, program_of, trust_ratio
from penstock.step.program import interpret, mesh

LENGTH, STEPS = 37, 12
Make = Callable[[list[torch.Tensor]], Optimizer]

MAKES: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1, maximize=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, weight_decay=0.02),
    "adam up": lambda params: torch.optim.Adam(params, lr=0.05, maximize=True, eps=1e-5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.95)),
    "lamb": lambda params: LAMB(params, lr=0.05, weight_decay=0.1),
}


def gradients(num_ranks: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(STEPS, num_ranks, LENGTH))


def by_torch(make: Make, grads: np.ndarray) -> np.ndarray:
    """Return what one process makes of the mean over ranks, in float64."""
    weight = torch.linspace(-1, 1, LENGTH, dtype=torch.float64).requires_grad_()
    optimizer = make([weight])
    for each in grads.mean(axis=1):
        weight.grad = torch.from_numpy(each.copy())
        optimizer.step()
    return weight.detach().numpy()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MAKES)
def test_a_program_means_what_torch_does(name: str, num_ranks: int) -> None:
    grads = gradients(num_ranks)
    optimizer = MAKES[name]([torch.zeros(1, requires_grad=True)])
    written = program_of(optimizer).on(mesh(dp=num_ranks), n=LENGTH)
    group = optimizer.param_groups[0]
    held: dict[str, Any] = {name: np.zeros(LENGTH) for name in written.states}
    held["w"] = np.linspace(-1, 1, LENGTH)
    for step in range(STEPS):
        given = {"g": list(grads[step]), "t": step + 1, "lr": group["lr"], **held}
        held = dict(interpret(written, given).states)
    for weight in held["w"]:
        np.testing.assert_allclose(weight, by_torch(MAKES[name], grads), rtol=1e-9, atol=1e-12)


def test_there_is_no_program_of_what_is_not_known() -> None:
    with pytest.raises(OptionError, match=r"no program for RMSprop.* SGD, Adam, AdamW, LAMB"):
        program_of(torch.optim.RMSprop([torch.zeros(1, requires_grad=True)]))


@pytest.mark.parametrize("options", [{"lr": -1}, {"eps": -1}, {"betas": (1.0, 0.9)}])
def test_lamb_refuses_nonsense(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="LAMB"):
        LAMB([torch.zeros(1, requires_grad=True)], **options)


def test_a_parameter_of_length_zero_moves_as_proposed() -> None:
    assert trust_ratio(0.0, 3.0) == trust_ratio(3.0, 0.0) == 1.0
    assert trust_ratio(6.0, 3.0) == 2.0
