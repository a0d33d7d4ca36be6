"""Functions of the user in a step: whose memory their results lie in, and what they may not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock.step as ps
from penstock.errors import ProgramError

LIKE = ps.Type(shape=(4,))


@ps.program
def counting(w: ps.R[4]):
    (old,) = ps.call("f", w, outs=[LIKE])
    w = ps.update(w, w + 1.0)
    return old, old * 1.0, w * 1.0


@ps.program
def twice(x: ps.R[4], k):
    (one,) = ps.call("f", x * k, outs=[LIKE])
    (other,) = ps.call("f", x * (k + 1.0), outs=[LIKE])
    return one + 0.0, other + 0.0


@ps.program
def returned(x: ps.R[4], k):
    (y,) = ps.call("f", x * k, outs=[LIKE])
    return y


@ps.program
def rows(x: ps.R[4]):
    (y,) = ps.call("f", x, outs=[LIKE], batch=((0,), (0,)))
    return y


def steps_of(
    template: ps.Template, function: Callable[..., Any], *given: dict[str, Any]
) -> list[list[float]]:
    """Return the first elements of what steps return, looked at when all are done."""
    program = template.on(ps.mesh(dp=1))
    with (
        ps.Groups(program.mesh) as groups,
        ps.compile(program, groups, calls={"f": function}) as step,
    ):
        outputs = [step(**one) for one in given]
    return [[float(one[0]) for one in out] for out in outputs]


@pytest.mark.parametrize("function", [lambda w: w, lambda w: w.view(2, 2).view(4), torch.detach])
def test_a_function_may_return_what_it_was_given(function: Callable[..., Any]) -> None:
    w = torch.zeros(4)
    found = steps_of(counting, function, {"w": w}, {"w": w})
    assert found == [[0.0, 0.0, 1.0], [1.0, 1.0, 2.0]]
    expected = ps.interpret(counting.on(ps.mesh(dp=1)), {"w": np.zeros(4)}, calls={"f": np.copy})
    assert found[0] == [float(held[0][0]) for held in expected.outputs]


def test_a_function_may_use_its_memory_again() -> None:
    room, x = torch.zeros(4), torch.ones(4)
    assert steps_of(twice, room.copy_, {"x": x, "k": 2.0}) == [[2.0, 3.0]]
    kept = steps_of(returned, room.copy_, {"x": x, "k": 2.0}, {"x": x, "k": 5.0})
    assert kept == [[2.0], [5.0]]


WRONG = [
    (lambda x: x.mul_(2.0), "'f' writes over its operand x"),
    (lambda x: (), "'f' returns 0 values, the program says 1"),
    (lambda x: (x * 1, x * 1), "'f' returns 2 values"),
]


@pytest.mark.parametrize(("function", "said"), WRONG)
def test_what_a_function_may_not_do_is_told(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        steps_of(rows, function, {"x": torch.ones(4)})


@pytest.mark.parametrize("made", [torch.Tensor.double, torch.Tensor.numpy, torch.Tensor.tolist])
def test_a_result_of_a_chunk_is_as_the_program_says(made: Callable[..., Any]) -> None:
    plain = rows.on(ps.mesh(dp=1))
    for program in (plain, plain.chunk(2, plain.outputs[0])):
        with (
            ps.Groups(program.mesh) as groups,
            ps.compile(program, groups, calls={"f": made}) as step,
            pytest.raises(
                ProgramError, match=f"{plain.outputs[0]} .*is .*(float64|NumPy array|ndarray|list)"
            ),
        ):
            step(x=torch.ones(4))
