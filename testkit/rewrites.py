"""Random rewrites of a program, and whether one still means what it did.

`ARGUMENTS` says for each rewrite how its arguments may be drawn; most draws are refused, which is
half of the test. What is not refused must leave all outputs, states and stored values as they were,
and what could be carried out must have a plan afterwards too (`refused`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from penstock.errors import ProgramError
from penstock.step.program.check import check_plan
from penstock.step.program.interpret import Held, Outcome, interpret
from penstock.step.program.lower import lower
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Attr, Node, Program, Rewrite
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.passes import PASSES
from penstock.step.program.types import Type
from penstock.step.program.verify import verified
from penstock.step.program.ways import ALGOS
from testkit.programs import Sample

__all__ = [
    "ARGUMENTS",
    "applied",
    "differences",
    "differences_on_one_rank",
    "random_rewrite",
    "refused",
]

Draw = Callable[[Random, Program], Rewrite | None]


def random_rewrite(rng: Random, program: Program, names: Sequence[str] = ()) -> Rewrite | None:
    """Return a rewrite that might be legal; None where the program has nothing to try it on."""
    known = [name for name in names or ARGUMENTS if name in PASSES]
    (name,) = rng.choices(known, [_WEIGHTS.get(name, 4) for name in known])
    return ARGUMENTS[name](rng, program)


def differences(
    sample: Sample, program: Program, *, iterations: int = 2, bitwise: bool = False
) -> list[str]:
    """Return where a program does something else than the one of a sample."""
    before = _carried_out(sample.program, sample, iterations)
    after = _carried_out(program, sample, iterations)
    bound = 0.0 if bitwise else _bound(before)
    return _compared(_made(sample.program, before), _made(program, after), bound)


def _bound(outcome: Outcome) -> float:
    """Rounding of a sum in another order grows with the largest number that went into it."""
    return 1e-11 * max(1.0, *(_largest(held) for held in outcome.values.values()))


def _compared(
    expected: dict[str, list[Any]], found: dict[str, list[Any]], bound: float
) -> list[str]:
    out = [f"{name} is gone" for name in expected.keys() - found.keys()]
    for name in expected.keys() & found.keys():
        off = _distance(expected[name], found[name])
        if not off <= bound:
            out.append(f"{name} is off by {off}, more than {bound}")
    return sorted(out)


def differences_on_one_rank(sample: Sample) -> list[str]:
    """Return where a program does something else on its mesh than all alone with whole values.

    That is what layouts promise, where nothing is local to a rank.
    """
    mesh = Mesh(axes=tuple((name, 1) for name in sample.program.mesh.names))
    alone = replace(
        sample,
        program=verified(replace(sample.program, mesh=mesh)),
        wholes={
            n.name: _added(sample.wholes[n.name], n.type)
            for n in sample.program.inputs
            if n.op == "input"
        },
    )
    before = _carried_out(alone.program, alone, 2)
    after = _carried_out(sample.program, sample, 2)
    return _compared(_made(alone.program, before), _made(sample.program, after), _bound(before))


def _added(addends: Any, made: Type) -> Any:
    ops = {layout.op for _, layout in made.layouts if layout.kind == "P"}
    together: Any = {"max": np.max, "min": np.min}.get(next(iter(ops), ""), np.sum)
    return together(addends, axis=0, keepdims=True)


def _carried_out(program: Program, sample: Sample, iterations: int) -> Outcome:
    with np.errstate(all="ignore"):
        return interpret(
            program, sample.given(program), iterations=iterations, sources=sample.sources
        )


def _largest(held: Held) -> float:
    finite = [np.abs(one[np.isfinite(one)].astype(float)) for one in held]
    return max((float(one.max()) for one in finite if one.size), default=0.0)


def _made(program: Program, outcome: Outcome) -> dict[str, list[Any]]:
    """Return all that a program leaves behind, whole."""
    mesh = program.mesh
    out = {
        f"output {k}": wholes(held, program[name].type, mesh)
        for k, (name, held) in enumerate(zip(program.outputs, outcome.outputs, strict=True))
    }
    for state, held in outcome.states.items():
        out[f"state {state}"] = wholes(held, program[program.states[state]].type, mesh)
    for node in program.nodes:
        if node.op == "store":
            place = str(node.attr("place"))
            for k, held in enumerate(outcome.stored[place]):
                out[f"stored {place} {k}"] = wholes(held, node.type, mesh)
    return out


def wholes(held: Held, made: Type, mesh: Mesh) -> list[Any]:
    """Return the whole of a value, by place on the axes where it is local.

    What ranks have that should be the same is compared on the way.
    """
    out = []
    places = made.axes("L")
    for place in range(mesh.size(*places) if places else 1):
        ranks = [r for r in range(mesh.num_ranks) if mesh.coordinate(r, *places) == place]
        out.append(_whole(held, made, mesh, ranks))
    return out


def _whole(held: Held, made: Type, mesh: Mesh, ranks: list[int]) -> Any:
    axes = made.axes("P")
    ops = {made.layout(axis).op for axis in axes}
    together: Any = {"max": np.maximum, "min": np.minimum}.get(next(iter(ops), ""), np.add)
    whole = np.full(made.shape, np.nan)
    seen = np.zeros(made.shape, bool)
    for rank in ranks:
        group = mesh.group(rank, *axes) if axes else (rank,)
        part = held[group[0]].astype(float)
        for other in group[1:]:
            part = together(part, held[other])
        at = tuple(slice(*bound) for bound in made.bounds(mesh, rank))
        if not np.array_equal(part[seen[at]], whole[at][seen[at]], equal_nan=True):
            raise AssertionError(f"ranks {ranks} have different values of {made}")
        whole[at], seen[at] = part, True
    assert seen.all(), f"nobody has some of {made}"
    return whole


def _distance(a: list[Any], b: list[Any]) -> float:
    if len(a) != len(b):
        return np.inf
    out = 0.0
    for one, other in zip(a, b, strict=True):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(all="ignore"):
            off = np.where(same, 0.0, np.abs(one - other))
        worst = float(off.max()) if off.size else 0.0
        out = np.inf if np.isnan(worst) else max(out, worst)
    return out


# -- how to draw arguments ---------------------------------------------------------------------


def _named(program: Program, *ops: str) -> list[str]:
    return [node.name for node in program.nodes if node.op in ops]


def _some(rng: Random, found: Sequence[Any], least: int, most: int) -> list[Any]:
    return rng.sample(list(found), min(len(found), rng.randint(least, most)))


def _step(name: str, *args: Attr, **options: Attr) -> Rewrite:
    said = {key: value for key, value in options.items() if value is not None}
    return Rewrite(name=name, args=args, options=tuple(said.items()))


def _perhaps(rng: Random, share: float, found: Sequence[Any]) -> Any:
    return rng.choice(list(found)) if found and rng.random() < share else None


def _split(rng: Random, program: Program) -> Rewrite | None:
    names = _named(program, "all_reduce", "send", "load")
    if not names:
        return None
    return _step(
        "split",
        rng.choice(names),
        dim=_perhaps(rng, 0.5, range(3)),
        into=_perhaps(rng, 0.15, ["root"]),
        axis=_perhaps(rng, 0.3, program.mesh.names),
    )


def _sink(rng: Random, program: Program) -> Rewrite | None:
    op = rng.choice(("all_gather", "all_gather", "all_reduce"))
    names = _some(rng, _named(program, op), 1, 2 if rng.random() < 0.3 else 1)
    if not names:
        return None
    return _step("sink", *names, below=_perhaps(rng, 0.4, _computed(program)))


def _hoist(rng: Random, program: Program) -> Rewrite | None:
    names = _named(program, "all_gather", "all_reduce", "slice")
    if not names:
        return None
    return _step("hoist", rng.choice(names), above=_perhaps(rng, 0.5, _computed(program)))


def _computed(program: Program) -> list[str]:
    return [node.name for node in program.nodes if OPS[node.op].kind != "leaf"]


def _keep_sliced(rng: Random, program: Program) -> Rewrite | None:
    if not program.states:
        return None
    names = _some(rng, list(program.states), 1, 2)
    axis = _perhaps(rng, 0.6, program.mesh.names)
    return _step("keep_sliced", *names, axis=axis, dim=_perhaps(rng, 0.4, range(2)))


def _dead(rng: Random, program: Program) -> Rewrite | None:
    return _step("dead", *_some(rng, _computed(program), 0, 1))


def _wire(rng: Random, program: Program) -> Rewrite | None:
    moves = [node.name for node in program.nodes if is_move(node.op)]
    return _step("wire", *_some(rng, moves, 0, 1), dtype="bf16")


def _hier(rng: Random, program: Program) -> Rewrite | None:
    nodes = [n for n in program.nodes if n.op in ("all_reduce", "all_gather") and len(n.axes) > 1]
    if not nodes:
        return None
    node = rng.choice(nodes)
    return _step("hier", node.name, inner=_perhaps(rng, 0.5, node.axes), dim=rng.randrange(2))


def _factor(rng: Random, program: Program) -> Rewrite | None:
    axis, size = rng.choice(program.mesh.axes)
    outer = rng.choice([k for k in range(1, size + 1) if size % k == 0])
    return _step("factor", axis, (f"{axis}0", outer), (f"{axis}1", size // outer))


def _reshard(rng: Random, program: Program) -> Rewrite | None:
    names = _named(program, "all_gather")
    if not names:
        return None
    name = rng.choice(names)
    return _step("reshard", name, at=_perhaps(rng, 0.5, program.users[name]))


def _run(rng: Random, program: Program) -> list[Node]:
    """Return a few nodes that follow each other, which often belong together."""
    nodes = [node for node in program.nodes if OPS[node.op].kind != "leaf"]
    if not nodes:
        return []
    first = rng.randrange(len(nodes))
    out = [nodes[first]]
    for node in nodes[first + 1 :]:
        if {n.name for n in out} & set(node.inputs) and len(out) < 6:
            out.append(node)
    return out


def _fuse(rng: Random, program: Program) -> Rewrite | None:
    names = [node.name for node in _run(rng, program)]
    if len(names) < 2:
        return None
    chosen = names if rng.random() < 0.6 else [names[0], rng.choice(names[1:])]
    return _step("fuse", *chosen, norms=_perhaps(rng, 0.3, [True]))


def _chunk(rng: Random, program: Program) -> Rewrite | None:
    names = [node.name for node in _run(rng, program)]
    regions = [region.name for region in program.regions if region.kind == "fuse"]
    chosen = names[: rng.randint(1, 6)]
    if regions and rng.random() < 0.4:
        chosen = [rng.choice(regions)]
    return _step("chunk", rng.randint(1, 5), *chosen, dim=_perhaps(rng, 0.4, range(3)))


def _overlap(rng: Random, program: Program) -> Rewrite | None:
    regions = [region.name for region in program.regions]
    if rng.random() < 0.4:
        # Everything at once, as far as it does not overlap already.
        done = {n for r in program.regions if r.kind == "overlap" for n in r.nodes}
        return _step("overlap", *(name for name in _computed(program) if name not in done))
    return _step("overlap", *_some(rng, [*regions, *_computed(program)], 0, 2))


def _bucket(rng: Random, program: Program) -> Rewrite | None:
    op = rng.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    return _step("bucket", *_some(rng, _named(program, op), 2, 3))


def _ring(rng: Random, program: Program) -> Rewrite | None:
    products = [program[name] for name in _named(program, "matmul")]
    pairs = [
        (node.name, near)
        for node in products
        for near in (*node.inputs, *program.users[node.name])
        if program[near].op in ("all_gather", "reduce_scatter")
    ]
    return _step("ring", *rng.choice(pairs), by=rng.choice((1, -1))) if pairs else None


def _rotate(rng: Random, program: Program) -> Rewrite | None:
    names = [*_named(program, "load", "store", "all_gather"), *program.states]
    return _step("rotate", rng.choice(names), rng.randint(1, 2)) if names else None


def _algo(rng: Random, program: Program) -> Rewrite | None:
    moves = _named(program, "all_reduce", "reduce_scatter", "all_gather")
    way = rng.choice((*ALGOS, None))
    return Rewrite(name="algo", args=tuple(_some(rng, moves, 0, 2)), options=(("way", way),))


def _by_use(rng: Random, program: Program) -> Rewrite | None:
    lanes = ["io", *(f"net:{axis}" for axis in program.mesh.names)]
    return _step("priority_by_use", rng.choice(lanes))


def _priority(rng: Random, program: Program) -> Rewrite | None:
    names = [node.name for node in program.nodes if OPS[node.op].kind in ("move", "io")]
    return _step("priority", rng.choice(names), rng.randint(0, 9)) if names else None


ARGUMENTS: dict[str, Draw] = {
    "split": _split,
    "sink": _sink,
    "hoist": _hoist,
    "keep_sliced": _keep_sliced,
    "dead": _dead,
    "wire": _wire,
    "hier": _hier,
    "factor": _factor,
    "reshard": _reshard,
    "fuse": _fuse,
    "chunk": _chunk,
    "overlap": _overlap,
    "bucket": _bucket,
    "ring": _ring,
    "rotate": _rotate,
    "priority": _priority,
    "priority_by_use": _by_use,
    "algo": _algo,
}


_WEIGHTS = {
    "sink": 12,
    "split": 8,
    "keep_sliced": 8,
    "wire": 1,
    "priority": 1,
    "priority_by_use": 1,
    "algo": 2,
    "dead": 2,
    "factor": 2,
}
"""How often a rewrite is drawn, where it is not 4: more often what changes more."""


def refused(program: Program) -> str:
    """Return why a program cannot be carried out; nothing where it can."""
    try:
        check_plan(lower(program))
    except ProgramError as error:
        return str(error)
    return ""


def applied(program: Program, step: Rewrite) -> Program | None:
    """Return the program after a rewrite, or None if it is refused."""
    try:
        return program.apply(step.name, *step.args, **dict(step.options))
    except ProgramError:
        return None
