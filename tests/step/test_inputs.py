"""What a user gives that is something else is refused before anything begins, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import OptionError, PenstockError, ProgramError


@ps.program
def scaled(g: ps.P["n"], w: ps.R["n"], lr, times: int = 1):
    g = ps.all_reduce(g)
    return ps.update(w, w + lr**-1 * g * times)


def said_by(act: Callable[[], Any]) -> str:
    try:
        act()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, size: int) -> dict[str, str]:
    mesh = ps.mesh(dp=size)
    made, other = scaled.on(mesh, n=3), ps.Groups(ps.mesh(dp=1))
    said = {"fewer ranks": said_by(other.__enter__)}
    groups = ps.Groups(mesh)
    with groups:
        said["template"] = said_by(lambda: ps.compile(scaled, groups))
        said["mesh"] = said_by(lambda: ps.compile(made, mesh))
        said["backend"] = said_by(lambda: ps.compile(made, groups, backend="c++"))
        step = ps.compile(made, groups)
        g, w = torch.full((3,), rank + 1.0), torch.zeros(3)
        for name, bad in {
            "text": {"lr": "0.1"},
            "three": {"lr": torch.ones(3)},
            "fraction": {"lr": 0.5, "times": 1.5},
            "array": {"w": np.zeros(3), "lr": 0.5},
            "list": {"g": [1.0], "lr": 0.5},
        }.items():
            given: dict[str, Any] = {"g": g, "w": w, **bad}
            said[name] = said_by(lambda given=given: step(**given))
        # None of it has begun anything: the step goes on.
        for number in (2, 0.5, np.float32(4), torch.tensor([4.0])):
            step(g=g.clone(), w=w, lr=number, times=2.0)
        said["w"] = str(w.tolist())
    said["closed"] = said_by(lambda: step(g=g, w=w, lr=0.5))
    step.close()
    return said


def test_each_is_refused_alike_on_all_ranks_and_the_step_goes_on() -> None:
    first, second = run_ranks(refused, 2)
    for name, words in {
        "fewer ranks": "OptionError: the mesh dp=1 has 1 ranks, torch's default group has 2; make "
        "a mesh of 2 ranks, or start 1 processes",
        "template": "ProgramError: scaled has no mesh and no sizes yet; compile what scaled.on(",
        "mesh": "ProgramError: a program is compiled for Groups, not for a Mesh; write `with",
        "backend": "OptionError: no backend 'c++' for kernels; there are auto, eager,",
        "text": "ProgramError: lr is a str, should be one number",
        "three": "ProgramError: lr is a Tensor of shape (3,), should be one number",
        "fraction": "ProgramError: times is 1.5, should be a whole number",
        "closed": "ProgramError: the Groups of the step of scaled are closed; call it inside",
        "w": str([6.0 * (0.5 + 2 + 0.25 + 0.25)] * 3),
    }.items():
        assert first[name].startswith(words), first[name]
        assert first[name] == second[name]
    for rank, said in enumerate((first, second)):
        assert said["array"] == (
            f"ProgramError: w on rank {rank} is a NumPy array, should be a tensor of shape (3,); "
            "torch.from_numpy makes one of it"
        )
        assert "is a list, should be a tensor of shape (3,); give one" in said["list"]


def test_groups_without_processes_say_what_is_missing() -> None:
    with pytest.raises(OptionError, match=r"no group of processes; .*init_process_group first"):
        ps.Groups(ps.mesh(dp=2)).__enter__()
    with ps.Groups(ps.mesh(dp=1)) as groups, pytest.raises(ProgramError, match="not of a function"):
        ps.compile(refused, groups)


def test_whole_numbers_where_floats_are_meant_do_not_run_over() -> None:
    @ps.program
    def powers(x: ps.R[2], t):
        return x * 2**t, x * (t * t), x / t**-1

    made = powers.on(ps.mesh(dp=1))
    with ps.Groups(made.mesh) as groups, ps.compile(made, groups) as step:
        for t in (64, 2**33):
            found = [out[0].item() for out in step(x=torch.ones(2), t=t)]
            assert found == [np.float32(2.0**t if t < 128 else np.inf), float(t) ** 2, float(t)]
            held = ps.interpret(made, {"x": np.ones(2), "t": t}).outputs
            with np.errstate(over="ignore"):
                assert [float(np.float32(one[0][0])) for one in held] == found
