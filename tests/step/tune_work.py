"""Programs and work of ranks for the tests of the tuner; ranks import it by name."""

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program import P, Program, R, S, language, mesh, program
from penstock.program.cost import Costs
from penstock.step.calibrating import calibrate
from penstock.step.execute import compile as compile_step
from penstock.step.groups import Groups
from penstock.step.tuning import tune


@program(axis="tp")
def block(x: S(1)["t", "k"], w: S(0)["k", "h"], b: R["h"], r: R["t", "h"]):
    return language.all_reduce(x @ w) + b + r


@program
def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = language.all_reduce(g, "mean")
    m = language.update(m, b1 * m + (1 - b1) * g)
    v = language.update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return language.update(w, w - lr * step)


def block_on(size: int, t: int = 256, k: int = 64, h: int = 128) -> Program:
    return block.on(mesh(tp=size), t=t, k=k, h=h)


def tune_block(rank: int, size: int, cache: str | None) -> dict[str, Any]:
    made = block_on(size)
    torch.manual_seed(rank)
    given = {"x": torch.randn(256, 64 // size), "w": torch.randn(64 // size, 128)}
    torch.manual_seed(9)
    given |= {"b": torch.randn(128), "r": torch.randn(256, 128)}
    before = {name: tensor.clone() for name, tensor in given.items()}
    with Groups(made.mesh) as groups:
        tuned = tune(made, groups, given, budget_s=1.5, cache=cache)
        with compile_step(made, groups) as plain, compile_step(tuned.program, groups) as fast:
            (wanted,), (found,) = plain(**given), fast(**given)
            off = (wanted - found).abs().max().item()
    return {
        "digest": tuned.program.digest,
        "off": off,
        "is_cached": tuned.is_cached,
        "num_measured": tuned.num_measured,
        "text": str(tuned),
        "is_untouched": all(torch.equal(given[name], before[name]) for name in given),
    }


def tune_adam_sliced(rank: int, size: int) -> list[str]:
    made = adam.on(mesh(dp=size), n=1 << 16)
    torch.manual_seed(rank)
    given: dict[str, Any] = {"g": torch.randn(1 << 16), "t": 1, "lr": 1e-3}
    given |= {name: torch.zeros(1 << 16) for name in ("w", "m", "v")}
    with Groups(made.mesh) as groups:
        tuned = tune(made, groups, given, budget_s=1.5, cache=None, allow=("sliced",))
    return [tuned.program.digest, str(tuned.num_measured)]


def tune_differing(rank: int, size: int) -> str:
    made = block_on(size, h=128 + 64 * rank)
    with Groups(made.mesh) as groups:
        try:
            tune(made, groups, {}, costs=Costs(), budget_s=1.0, cache=None, measure=_never)
        except ProgramError as error:
            return str(error)
    return ""


def _never(made: Program) -> Any:
    raise AssertionError("a program is run though ranks have different ones")


def calibrated(rank: int, size: int, cache: str) -> list[str]:
    with Groups(mesh(dp=size)) as groups:
        costs = calibrate(groups, cache=cache)
        again = calibrate(groups, cache=cache)
    return [costs.to_json(), again.to_json()]
