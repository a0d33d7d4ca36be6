"""Programs to rewrite, and whether a rewritten one has the values of the first."""

from typing import Any

import numpy as np

from penstock.step.program import P, Program, R, S, interpret, mesh, program
from penstock.step.program.interpret import gathered
from penstock.step.program.language import all_reduce, dropout, gelu, update

WORLDS = [1, 2, 3, 4]


@program
def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = all_reduce(g, "mean")
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return update(w, w - lr * step)


@program(axis="tp")
def mlp(x: R["t", "d"], w1: S(1)["d", "h"], w2: S(0)["h", "d"], b: R["d"], seed: int):
    h = gelu(x @ w1)
    y = all_reduce(h @ w2)
    return dropout(y + b, 0.25, seed) + x


def adam_on(ranks: int, n: int = 11) -> Program:
    return adam.on(mesh(dp=ranks), n=n)


def sliced_adam(ranks: int, n: int = 11) -> Program:
    return adam_on(ranks, n).split("g").sink("g.gather").keep_sliced("m", "v")


def inputs(made: Program, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {"t": lambda step: step + 1, "lr": 0.01, "seed": 5}
    for node in made.inputs:
        if node.op == "input" and (node.type.axes("P") or node.type.axes("L")):
            out[node.name] = [
                rng.normal(size=node.type.local_shape(made.mesh, rank))
                for rank in range(made.mesh.num_ranks)
            ]
        elif node.op == "input":
            out[node.name] = np.abs(rng.normal(size=node.type.shape))
    return {k: v for k, v in out.items() if k in made}


def sources(made: Program) -> dict[str, Any]:
    shapes = {str(n.attr("source")): n.type.shape for n in made.nodes if n.op == "load"}
    return {
        name: lambda step, shape=shape: np.random.default_rng(step).normal(size=shape)
        for name, shape in shapes.items()
    }


def wholes(made: Program, given: dict[str, Any], iterations: int) -> list[Any]:
    got = interpret(made, given, iterations=iterations, sources=sources(made))
    out = [
        held if made[name].type.axes("L") else gathered(held, made[name].type, made.mesh)
        for name, held in zip(made.outputs, got.outputs, strict=True)
    ]
    out += [gathered(got.states[s], made[s].type, made.mesh) for s in sorted(got.states)]
    for name, held in sorted(got.stored.items()):
        node = next(n for n in made.nodes if n.attr("place") == name)
        out += [gathered(one, node.type, made.mesh) for one in held]
    return out


def assert_same(before: Program, after: Program, *, bits: bool = True, iterations: int = 3) -> None:
    given = inputs(before)
    want, got = wholes(before, given, iterations), wholes(after, given, iterations)
    assert len(want) == len(got)
    for one, other in zip(want, got, strict=True):
        if bits:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
