"""Programs that several tests run, each with inputs and a few schedules of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import penstock.step as ps
from penstock.step.program.blocks import attention, mlp, stage, with_gradients


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, what it is given, and how often it runs."""

    name: str
    program: ps.Program
    scalars: dict[str, Any] = field(default_factory=dict)
    iterations: int = 3
    donate: tuple[str, ...] = ()
    tolerance: float = 3e-6
    """Of the largest value; more where much is added up and little is left."""


@ps.program
def adam(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, b1 * m + (1 - b1) * g)
    v = ps.update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return ps.update(w, w - lr * step)


@ps.program
def lamb(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], lr):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, 0.9 * m + 0.1 * g)
    trust = ps.norm(w) / (ps.norm(m) + 1e-6)
    return ps.update(w, w - lr * trust * m)


@ps.program
def every_move(x: ps.P["n", "k"], y: ps.S(0)["n", "k"], z: ps.L["n", "k"]):
    total = ps.all_reduce(x)
    mine = ps.reduce_scatter(x, dim=1)
    other = ps.all_to_all(y, 1)
    whole = ps.all_gather(other) + total
    one = ps.broadcast(z, root=0)
    root = ps.reduce(x, root=0)
    passed = ps.send(z, to="next")
    back = ps.send(z, to="prev")
    largest = ps.all_reduce(ps.amax(y), "max")
    return whole, mine, one, root, passed, back, largest


@ps.program(axis="tp")
def ring_products(x: ps.S(0)["t", "d"], w1: ps.S(1)["d", "h"], w2: ps.S(0)["h", "d"]):
    whole = ps.all_gather(x)
    h = whole @ w1
    y = h @ w2
    return ps.reduce_scatter(y, dim=0)


@ps.program
def three(a: ps.P["n", "k"], b: ps.P["k"], c: ps.S(1)["k", "n"], d: ps.S(0)["n"]):
    a1, b1 = ps.all_reduce(a), ps.all_reduce(b)
    a2, b2 = ps.reduce_scatter(a, "mean", dim=1), ps.reduce_scatter(b, "mean")
    c1, d1 = ps.all_gather(c), ps.all_gather(d)
    return a1, b1, a2, b2, c1, d1


@ps.program
def vectors(x: ps.S(0)["n"], w: ps.S(0)["n", "k"]):
    """A vector is a row on the left of a product and a column on the right."""
    y = ps.all_reduce(x @ w)
    return y, w @ y, ps.all_reduce(x @ x)


@ps.program
def trained(x: ps.S(0)["b", "d"], w: ps.R["d", "k"], lr):
    y = x @ w
    (slope,) = ps.grad(ps.sum(y * y), [w])
    g = ps.all_reduce(slope)
    w = ps.update(w, w - lr * g)
    return y


def cases(size: int) -> Iterator[Case]:
    """Yield programs on so many ranks, first as they were written, then rewritten."""
    plain = adam.on(ps.mesh(dp=size), n=1003)
    step = {"t": lambda i: i + 1, "lr": 1e-2}
    sliced = plain.split("g").sink("g.gather").keep_sliced("m", "v")
    chunked = sliced.chunk(4, "g.scatter", "w.gather")
    for name, program in {
        "adam": plain,
        "adam, sharded": plain.split("g").sink("g.gather"),
        "adam, state sliced": sliced,
        "adam, fused": sliced.fuse("mul.1", "sub.5"),
        "adam, chunks": chunked,
        "adam, overlapped": chunked.overlap(),
    }.items():
        yield Case(name=name, program=program, scalars=step)
    yield Case(name="adam, in place", program=plain, scalars=step, donate=("g",), iterations=1)
    norms = lamb.on(ps.mesh(dp=size), n=997)
    yield Case(name="lamb", program=norms, scalars={"lr": 1e-2})
    yield Case(
        name="lamb, sharded", program=norms.split("g").sink("g.gather"), scalars={"lr": 1e-2}
    )
    whole = trained.on(ps.mesh(dp=size), b=12, d=7, k=5)
    ahead = whole.split("g").sink("g.gather").rotate("w")
    for name, program in {"trained": whole, "trained, gathered ahead": ahead}.items():
        yield Case(name=name, program=program, scalars={"lr": 1e-3}, iterations=4)
    rings = ring_products.on(ps.mesh(tp=size), t=11, d=5, h=7)
    gather, product, y, scatter = [n.name for n in rings.nodes][-4:]
    yield Case(name="rings", program=rings.ring(gather, product).ring(y, scatter, by=-1))
    many = three.on(ps.mesh(dp=size), n=7, k=5)
    a1, b1, a2, b2, c1, d1 = many.outputs
    yield Case(name="buckets", program=many.bucket(a1, b1).bucket(a2, b2).bucket(c1, d1))
    yield Case(name="moves", program=every_move.on(ps.mesh(dp=size), n=7, k=5))
    yield Case(name="vectors", program=vectors.on(ps.mesh(dp=size), n=11, k=5))
    yield from _parallel(size)


def _parallel(size: int) -> Iterator[Case]:
    seed = {"seed": 11}
    layer = mlp.on(ps.mesh(tp=size), t=24, d=10, h=13)
    yield Case(name="mlp", program=layer, scalars=seed)
    yield Case(name="mlp, sharded", program=layer.split("y").sink("y.gather"), scalars=seed)
    rows = layer.chunk(3, "matmul.1", layer.outputs[0], dim=0)
    yield Case(name="mlp, rows overlapped", program=rows.overlap(), scalars=seed)
    both = with_gradients(mlp).on(ps.mesh(tp=size), t=24, d=10, h=13)
    yield Case(name="mlp and gradients", program=both, scalars=seed)
    heads = with_gradients(attention(4), "x", "wq", "wo")
    if 4 % size == 0:
        block = heads.on(ps.mesh(tp=size), b=2, t=5, d=6, k=8)
        yield Case(name="attention", program=block, tolerance=1e-4)
    if size > 1:
        pipe = stage.on(ps.mesh(pp=size, tp=1), t=4, d=6, h=8)
        yield Case(name="pipeline", program=pipe, scalars=seed, iterations=size + 1)


def given_for(program: ps.Program, seed: int = 3) -> dict[str, Any]:
    """Return values for the tensors of a program: whole ones, or one for each rank."""
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for node in program.inputs:
        if node.op != "input":
            continue
        made = node.type
        shapes = [made.local_shape(program.mesh, r) for r in range(program.mesh.num_ranks)]
        if made.axes("P") or made.axes("L"):
            out[node.name] = [_numbers(rng, shape) for shape in shapes]
        else:
            out[node.name] = np.abs(_numbers(rng, made.shape))
    return out


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    # As float32 has them, so that both sides begin with the same.
    return rng.normal(size=shape).astype(np.float32).astype(np.float64)
