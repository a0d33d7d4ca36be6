"""Programs and work of ranks for the tests of the tuner; ranks import it by name."""

import warnings
from typing import Any

import torch
import torch.distributed

from penstock.errors import ProgramError
from penstock.step.execute import compile as compile_step
from penstock.step.groups import Groups
from penstock.step.program import P, Program, R, S, Type, language, mesh, program
from penstock.step.program.cost import MachineCosts
from penstock.step.program.schedule import apply
from penstock.step.tuner import calibrate as calibrating
from penstock.step.tuner import tune as tuning
from penstock.step.tuner.calibrate import calibrate
from penstock.step.tuner.search import Candidate, Search
from penstock.step.tuner.trial import CarriedTrial, MeasuredTrials
from penstock.step.tuner.tune import Tuned, tune


@program(axis="tp")
def block(x: S(1)["t", "k"], w: S(0)["k", "h"], b: R["h"], r: R["t", "h"]):
    return language.all_reduce(x @ w) + b + r


@program
def momentum(g: P["n"], w: R["n"], m: R["n"], lr):
    m = language.update(m, 0.9 * m + language.all_reduce(g, "mean"))
    return language.update(w, w - lr * m)


@program
def backward(x: S(0)["b", "n"], w1: R["n", "n"], w2: R["n", "n"], w3: R["n", "n"], lr):
    """A chain of gradients, each with its all-reduce, then updates: a step as DDP's."""
    out = []
    for w in (w3, w2, w1):
        g = language.all_reduce(language.transpose(x) @ x)
        x = x @ w
        out.append(language.update(w, w - lr * g))
    return tuple(out)


@program
def called(x: P["n"]):
    (y,) = language.call("double", x, outs=(x.type,))
    return language.all_reduce(y)


def block_on(size: int, t: int = 256, k: int = 64, h: int = 128) -> Program:
    return block.on(mesh(tp=size), t=t, k=k, h=h)


def block_given(rank: int, size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    given = {"x": torch.randn(256, 64 // size), "w": torch.randn(64 // size, 128)}
    torch.manual_seed(9)
    return given | {"b": torch.randn(128), "r": torch.randn(256, 128)}


def tune_block(rank: int, size: int, folder: str) -> dict[str, Any]:
    given = block_given(rank, size)
    before = {name: tensor.clone() for name, tensor in given.items()}
    seen = {"tp": 1e8}
    tuning.speeds = lambda groups: seen  # A busy machine has no speed that can be relied on.
    with Groups(mesh(tp=size)) as groups:
        tuned = tune(block, groups, given, costs=MachineCosts(), budget_s=1.0, cache=folder)
        again = tune(
            block_on(size), groups, given, costs=MachineCosts(), budget_s=0.1, cache=folder
        )
        seen["tp"] = 1e9
        other = tune(
            block_on(size), groups, given, costs=MachineCosts(), budget_s=0.1, cache=folder
        )
        with compile_step(tuned.baseline, groups) as plain, tuned.compile(groups) as fast:
            (wanted,), (found,) = plain(**given), fast(**given)
            off = (wanted - found).abs().max().item()
    return {
        "digest": tuned.program.digest,
        "baseline": tuned.baseline.digest,
        "off": off,
        "num_measured": tuned.num_measured,
        "again": (again.is_cached, again.program.digest),
        "other": other.is_cached,
        "is_untouched": all(torch.equal(given[name], before[name]) for name in given),
    }


class _Fails(MeasuredTrials):
    """On the last rank some programs cannot be prepared."""

    def __init__(self, groups: Groups, inputs: dict[str, Any], which: str) -> None:
        super().__init__(groups, inputs)
        self._which, self._is_last = which, groups.rank == groups.mesh.num_ranks - 1

    def __call__(self, made: Program) -> CarriedTrial:
        trial = super().__call__(made)
        if self._is_last and (self._which == "all" or made.regions):
            raise MemoryError("no room here")
        return trial


def tune_failing(rank: int, size: int) -> list[Any]:
    made, given = block_on(size), block_given(rank, size)
    how: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 1.0, "cache": None}

    def double(x: torch.Tensor) -> torch.Tensor:
        if rank == size - 1:
            raise ValueError("rank has no twice")
        return 2 * x

    with Groups(made.mesh) as groups:
        some = tune(made, groups, given, measure=_Fails(groups, given, "some"), **how)
        words = [str(some.is_changed), str(some.num_measured)]
        mine = called.on(made.mesh, n=8)
        numbers = {"x": torch.ones(8)}
        measures = [
            (made, _Fails(groups, given, "all")),
            (mine, MeasuredTrials(groups, numbers, calls={"double": double})),
        ]
        for one, measure in measures:
            try:
                tune(one, groups, given, measure=measure, **how)
            except ProgramError as error:
                words.append(str(error))
        with compile_step(made, groups) as step:
            words.append(str(bool(step(**given)[0].isfinite().all())))
    return words


def watch(rank: int, size: int) -> dict[str, Any]:
    made, given = block_on(size), block_given(rank, size)
    # The first rank remembers faster steps than there are, the others have nothing to complain.
    seconds = 1e-9 if rank == 0 else float("nan")
    with Groups(made.mesh) as groups:
        tuned = Tuned(program=made, baseline=made, seconds=seconds)
        with tuned.compile(groups) as step, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            is_early = step.retune(given)
            for _ in range(40):
                step(**given)
            drifted = step.has_drifted
            is_tuned = step.retune(given, budget_s=0.3)
            out = step(**given)[0]
            wanted = given["x"] @ given["w"]
            torch.distributed.all_reduce(wanted)
            wanted += given["b"] + given["r"]
            return {
                "early": is_early,
                "drifted": drifted,
                "tuned": is_tuned,
                "after": step.has_drifted,
                "seconds": step.tuned.seconds,
                "warned": [str(each.message) for each in said if "retune" in str(each.message)],
                "off": (out - wanted).abs().max().item(),
            }


def by_each_way(rank: int, size: int) -> dict[str, Any]:
    made = momentum.on(mesh(dp=size), n=1000)
    split = made.split(next(n.name for n in made.nodes if n.op == "all_reduce"))
    torch.manual_seed(rank)
    g = torch.randn(1000)
    out: dict[str, Any] = {}
    with Groups(made.mesh) as groups:
        ways = {"as it is": made, "split": split}
        ways |= {way: made.algo(way=way) for way in ("direct", "ring", "native")}
        ways |= {f"split {way}": split.algo(way=way) for way in ("direct", "ring")}
        for name, one in ways.items():
            with compile_step(one, groups) as step:
                step_given = {"g": g.clone(), "w": torch.zeros(1000), "m": torch.zeros(1000)}
                out[name] = step(**step_given, lr=1.0)[0].tolist()
    return out


def tune_sliced(rank: int, size: int) -> list[str]:
    made = momentum.on(mesh(dp=size), n=1 << 16)
    torch.manual_seed(rank)
    given: dict[str, Any] = {"g": torch.randn(1 << 16), "lr": 1e-3}
    given |= {name: torch.zeros(1 << 16) for name in ("w", "m")}
    how: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 1.0, "cache": None}
    with Groups(made.mesh) as groups:
        tuned = tune(made, groups, given, allow=("sliced",), **how)
    return [tuned.program.digest, str(tuned.num_measured)]


def tune_differing(rank: int, size: int) -> str:
    made = block_on(size, h=128 + 64 * rank)
    with Groups(made.mesh) as groups:
        try:
            tune(made, groups, {}, costs=MachineCosts(), budget_s=1.0, cache=None, measure=_never)
        except ProgramError as error:
            return str(error)
    return ""


def _never(made: Program) -> Any:
    raise AssertionError("a program is run though ranks have different ones")


def calibrated(rank: int, size: int, folder: str) -> list[str]:
    seen = {"dp": 1e8}
    calibrating.speeds = lambda groups: seen
    with Groups(mesh(dp=size)) as groups:
        costs = calibrate(groups, cache=folder)
        again = calibrate(groups, cache=folder)
        seen["dp"] = 1e9
        other = calibrate(groups, cache=folder)
    with Groups(mesh(dp=size), backend="shm") as groups:
        shared = calibrate(groups)
    return [each.to_json() for each in (costs, again, other, shared)]


@program
def trained(w: R["n"], m: R["n"], lr):
    x = language.load("train.x", S(0)["b", "n"])
    like = Type(shape=w.type.shape, layouts=(("dp", P),))
    (g,) = language.call("gradient", x, w, outs=(like,))
    m = language.update(m, 0.9 * m + language.all_reduce(g, "mean"))
    language.store(m, "kept")
    return language.update(w, w - lr * m)


def few(*texts: str) -> Any:
    """Return a search that finds these schedules, however little time it has."""

    def search(made: Program, *args: Any, **how: Any) -> Search:
        found = [Candidate(program=made, predicted_s=1.0)]
        found += [Candidate(program=apply(made, text), predicted_s=0.5) for text in texts]
        return Search(candidates=found, num_tried=len(texts))

    return search


class _NoData:
    def __iter__(self) -> Any:
        raise OSError("no data here")


class _Spoils(MeasuredTrials):
    """On the last rank, one element of a state is wrong after every other schedule."""

    def __call__(self, made: Program) -> CarriedTrial:
        trial = super().__call__(made)
        results = trial.results

        def spoiled() -> Any:
            found = results()
            if made.history and self.groups.rank == self.groups.mesh.num_ranks - 1:
                found["state m"].tensor[-1] += 1.0
            return found

        trial.results = spoiled  # type: ignore[method-assign]
        return trial


def tune_loading(rank: int, size: int) -> dict[str, Any]:
    """Tune a step with a batch, a function and a store; then one whose batch is missing here."""
    made = trained.on(mesh(dp=size), b=2 * size, n=1 << 15)
    torch.manual_seed(0)
    given: dict[str, Any] = {"w": torch.randn(1 << 15), "m": torch.zeros(1 << 15), "lr": 0.1}
    torch.manual_seed(rank)
    batch = torch.randn(2, 1 << 15)
    stored: list[torch.Tensor] = []
    options: dict[str, Any] = {
        "calls": {"gradient": lambda x, w: (x * w).sum(0), "kept": stored.append},
        "sources": {"train": [{"x": batch}]},
        "backend": "eager",
    }
    how: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 0.2, "cache": None}
    out: dict[str, Any] = {"failed": ""}
    with Groups(made.mesh) as groups:
        tuning.search = few("split('all_reduce.1')\nsink('all_reduce.1.gather')\n")
        out["sliced"] = tune(made, groups, given, **how, **options).num_measured
        tuning.search = few("split('all_reduce.1')\nrotate('x', 1)\n")
        tuned = tune(made, groups, given, **how, **options)
        wrong = tune(made, groups, given, measure=_Spoils(groups, given, **options), **how)
        out |= {"num_measured": tuned.num_measured, "wrong": wrong.num_measured}
        out |= {"stored": len(stored), "digest": tuned.program.digest}
        try:
            lacking = {"train": _NoData()} if rank == size - 1 else options["sources"]
            tune(made, groups, given, **how, **{**options, "sources": lacking})
        except ProgramError as error:
            out["failed"] = str(error)
        wanted = (batch * given["w"]).sum(0)
        torch.distributed.all_reduce(wanted)
        wanted = given["w"] - 0.1 * wanted / size
        with tuned.compile(groups, **options) as step:
            out["off"] = (step(**given)[0] - wanted).abs().max().item()
    return out
