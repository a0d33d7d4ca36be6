"""The meaning of a program: all its ranks in one process, in float64, one value after the other.

A value is a list with what each rank has of it. Nothing here is fast or clever; every schedule is
compared with it. Regions that cut into chunks are carried out chunk by chunk, rings step by step,
so a wrong cut shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import ProgramError
from penstock.step.program.calls import function_of
from penstock.step.program.chunks import chunk_places
from penstock.step.program.contract import contracted
from penstock.step.program.mesh import Mesh
from penstock.step.program.moves import At, Held, Place, moved, reduced
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import OPS, Array, Elements, computed, is_pointwise
from penstock.step.program.rings import run_ring
from penstock.step.program.types import Type

__all__ = ["Held", "Outcome", "gathered", "interpret", "scattered"]

Calls = Mapping[str, Callable[..., Any]]
Sources = Mapping[str, Callable[[int], Any]]
"""By name: the whole batch of an iteration."""

_NUMPY = {"bool": np.bool_, "i64": np.int64, "i32": np.int64, "u8": np.int64}


@dataclass(kw_only=True)
class Outcome:
    """The results of a program."""

    outputs: list[Held]
    """Of the last iteration."""
    states: dict[str, Held]
    """As the last iteration left them."""
    stored: dict[str, list[Held]] = field(default_factory=dict)
    """By place, one an iteration."""
    values: dict[str, Held] = field(default_factory=dict)
    """Everything the last iteration made."""


def interpret(
    program: Program,
    given: Mapping[str, Any],
    *,
    iterations: int = 1,
    calls: Calls | None = None,
    sources: Sources | None = None,
) -> Outcome:
    """Return the results of a program.

    A tensor is given whole, or as a list with the part of each rank: partial and local ones must
    be lists.
    Scalars are numbers, or functions of the iteration.
    """
    ranks = _InterpretedRanks(program, calls or {}, sources or {})
    states = {n.name: _given(n, given, program) for n in program.inputs if n.op == "input"}
    out = Outcome(outputs=[], states={})
    for iteration in range(iterations):
        values: dict[str, Held] = dict(states)
        for node in program.inputs:
            if node.op == "scalar":
                number = _number(node, given, program, iteration)
                values[node.name] = [np.asarray(number) for _ in range(program.mesh.num_ranks)]
        ranks.run(values, iteration)
        for state, last in program.states.items():
            states[state] = values[last]
        for node in program.nodes:
            if node.op == "store":
                out.stored.setdefault(str(node.attr("place")), []).append(values[node.name])
        out.outputs = [values[name] for name in program.outputs]
        out.values = values
    out.states = {name: states[name] for name in program.states}
    return out


def scattered(whole: Any, made: Type, mesh: Mesh) -> Held:
    """Return the parts of all ranks of a whole value."""
    array = np.asarray(whole, _dtype(made))
    if array.shape != made.shape:
        raise ProgramError(f"a value of shape {array.shape} where the program has {made.shape}")
    if made.axes("P") or made.axes("L"):
        raise ProgramError(f"a value held as {made} has no whole; give a list, one for each rank")
    return [
        array[tuple(slice(*bound) for bound in made.bounds(mesh, rank))].copy()
        for rank in range(mesh.num_ranks)
    ]


def gathered(held: Held, made: Type, mesh: Mesh) -> Array:
    """Return the whole of a value; partial ones are reduced."""
    for axis in made.axes("L"):
        raise ProgramError(f"a value that is local on axis {axis!r} has no whole")
    axes = made.axes("P")
    ops = {made.layout(axis).op for axis in axes}
    assert len(ops) <= 1, f"partial by {ops}"
    op = next(iter(ops), "sum")
    out: Array = np.zeros(made.shape, _dtype(made))
    for group in mesh.groups(*axes) if axes else [(r,) for r in range(mesh.num_ranks)]:
        bounds = tuple(slice(*bound) for bound in made.bounds(mesh, group[0]))
        out[bounds] = reduced([held[r] for r in group], op)
    return out


def _dtype(made: Type) -> Any:
    return _NUMPY.get(made.dtype, np.float64)


def _given(node: Node, given: Mapping[str, Any], program: Program) -> Held:
    if node.name not in given:
        raise ProgramError(f"program {program.name} needs {node.name} ({node.type})")
    value, mesh = given[node.name], program.mesh
    if not isinstance(value, list):
        return scattered(value, node.type, mesh)
    if len(value) != mesh.num_ranks:
        raise ProgramError(f"{node.name} is given for {len(value)} ranks of {mesh.num_ranks}")
    held = [np.array(one, _dtype(node.type)) for one in value]
    for rank, one in enumerate(held):
        if one.shape != node.type.local_shape(mesh, rank):
            raise ProgramError(
                f"{node.name} of rank {rank} has shape {one.shape}, the program has "
                f"{node.type.local_shape(mesh, rank)} there"
            )
    return held


def _number(node: Node, given: Mapping[str, Any], program: Program, iteration: int) -> float:
    found = given.get(node.name, dict(program.defaults).get(node.name))
    if found is None:
        raise ProgramError(f"program {program.name} needs a number for {node.name}")
    number: float = found(iteration) if callable(found) else found
    return number


class _InterpretedRanks:
    """All ranks of a program, one value after the other."""

    def __init__(self, program: Program, calls: Calls, sources: Sources) -> None:
        self._program = program
        self._mesh = program.mesh
        self._calls, self._sources = calls, sources
        self._together = program.region_by_node("chunk", "ring")
        self._order = contracted(program, ("chunk", "ring"))
        self._called: dict[str, list[tuple[Any, ...]]] = {}

    def run(self, values: dict[str, Held], iteration: int) -> None:
        for group in self._order:
            region = self._together.get(group[0])
            if region is not None and region.kind == "ring":
                values.update(run_ring(self._program, region, values))
            elif region is not None:
                self._run_chunks(region, values)
            elif group[0] not in values:
                values[group[0]] = self._whole(self._program[group[0]], values, iteration)

    # -- one node ------------------------------------------------------------------------------

    def _whole(self, node: Node, values: dict[str, Held], iteration: int) -> Held:
        if node.op == "load":
            name = str(node.attr("source"))
            if name not in self._sources:
                raise ProgramError(f"no source called {name!r} was given")
            return scattered(self._sources[name](iteration), node.type, self._mesh)
        if node.op == "const":
            return [np.asarray(node.attr("value"))] * self._mesh.num_ranks
        inputs = [values[name] for name in node.inputs]
        in_at = [self._everything(self._program[name].type) for name in node.inputs]
        return self._computed(node, inputs, self._everything(node.type), in_at)

    def _call(self, node: Node, inputs: list[Held], out_at: At) -> Held:
        """Return what a call makes: results where it has a type of its own, else zeros by sample.

        Picks find the results of all ranks in `_called`.
        """
        if node.op == "pick":
            index = int(node.attr("index"))
            out = [np.asarray(out[index]) for out in self._called[node.inputs[0]]]
            return [_checked(node, one, at) for one, at in zip(out, out_at, strict=True)]
        function = function_of(node, self._calls)
        results = [function(*(held[r] for held in inputs)) for r in range(len(inputs[0]))]
        self._called[node.name] = [r if isinstance(r, tuple) else (r,) for r in results]
        if node.attr("batch") is not None:
            return [np.zeros(tuple(map(len, at))) for at in out_at]
        return [np.asarray(out[0]) for out in self._called[node.name]]

    def _everything(self, made: Type) -> At:
        """Return by rank the coordinates of all that it has of a value."""
        bounds = [made.bounds(self._mesh, rank) for rank in range(self._mesh.num_ranks)]
        return [tuple(np.arange(*bound) for bound in each) for each in bounds]

    def _computed(self, node: Node, inputs: list[Held], out_at: At, in_at: list[At]) -> Held:
        """Return what a node makes, given the coordinates of its operands and its result."""
        if node.op in ("call", "pick"):
            return self._call(node, inputs, out_at)
        if OPS[node.op].kind == "move" or node.op in ("slice", "update", "recv", "store"):
            return moved(node, inputs, self._mesh, out_at, in_at)
        out = []
        types = [self._program[name].type for name in node.inputs]
        for rank in range(self._mesh.num_ranks):
            elements = Elements(shape=node.type.shape, coordinates=out_at[rank])
            args = [
                aligned(held[rank], types[k], in_at[k][rank], node, out_at[rank])
                for k, held in enumerate(inputs)
            ]
            out.append(_evaluated(node, args, elements))
        return out

    # -- chunks --------------------------------------------------------------------------------

    def _run_chunks(self, region: Region, values: dict[str, Held]) -> None:
        program = self._program
        nodes = [program[name] for name in region.nodes]
        touched = {*region.nodes, *(name for node in nodes for name in node.inputs)}
        made: dict[str, Held] = {}
        for chunk in range(region.num_chunks):
            at = {name: self._chunk_of(region, name, chunk) for name in touched}
            parts = {
                name: self._part(region, name, values[name], at[name])
                for name in touched - {*region.nodes}
            }
            for node in nodes:
                held = [parts[name] for name in node.inputs]
                in_at = [at[name] for name in node.inputs]
                parts[node.name] = self._computed(node, held, at[node.name], in_at)
            for name in region.nodes:
                whole = made.setdefault(name, self._zeros(name, parts[name]))
                for rank, where in enumerate(self._inside(name, at[name])):
                    whole[rank][where] = parts[name][rank]
        values.update(made)

    def _part(self, region: Region, name: str, held: Held, at: At) -> Held:
        """Return the chunk of an operand; all of it, if the region does not cut it."""
        if region.dim(name) is None:
            return held
        return [one[where] for one, where in zip(held, self._inside(name, at), strict=True)]

    def _chunk_of(self, region: Region, name: str, chunk: int) -> At:
        made, mesh = self._program[name].type, self._mesh
        ranks = range(mesh.num_ranks)
        return [chunk_places(region, name, made, mesh=mesh, rank=r, chunk=chunk) for r in ranks]

    def _zeros(self, name: str, like: Held) -> Held:
        made = self._program[name].type
        return [
            np.zeros(made.local_shape(self._mesh, rank), one.dtype) for rank, one in enumerate(like)
        ]

    def _inside(self, name: str, at: At) -> list[Any]:
        """Return by rank where elements lie within the rank's part, as an index."""
        out: list[Any] = []
        for rank, place in enumerate(at):
            bounds = self._program[name].type.bounds(self._mesh, rank)
            out.append(np.ix_(*(c - first for c, (first, _) in zip(place, bounds, strict=True))))
        return out


def aligned(held: Array, made: Type, at: Place, node: Node, out_at: Place) -> Array:
    """Return the part of an operand that meets a rank's part of the result.

    A rank that has all of a value slices it for nothing beside a sliced one.
    """
    if OPS[node.op].kind not in ("pointwise", "matmul") or not held.ndim:
        return held
    # In a product only batches are aligned; rows and columns stay as they are.
    aligned_dims = held.ndim - 2 if node.op == "matmul" else held.ndim
    picked: list[Any] = []
    for dim in range(held.ndim):
        out_dim = dim + len(out_at) - held.ndim
        if dim >= aligned_dims or made.shape[dim] == 1 or len(at[dim]) == len(out_at[out_dim]):
            picked.append(np.arange(held.shape[dim]))
        else:
            picked.append(np.searchsorted(at[dim], out_at[out_dim]))
    out: Array = held[np.ix_(*picked)]
    return out


def _checked(node: Node, made: Array, at: Place) -> Array:
    shape = tuple(map(len, at))
    if made.shape != shape:
        raise ProgramError(
            f"{node.inputs[0]} made a value of shape {made.shape} where the program has {shape}"
        )
    return made


def _evaluated(node: Node, args: list[Array], elements: Elements) -> Array:
    op, attrs = OPS[node.op], dict(node.attrs)
    shape = tuple(len(at) for at in elements.coordinates)
    if node.op in ("unflatten", "flatten"):
        return args[0].reshape(shape)
    if node.op == "expand":
        dims = tuple(node.attr("dims"))
        ones = tuple(1 if d in dims else n for d, n in enumerate(shape))
        return np.broadcast_to(args[0].reshape(ones), shape)
    assert op.compute is not None, node.op
    if is_pointwise(node.op) and not node.type.shape:
        out = np.asarray(computed(node.op, args, attrs, node.type.dtype))
    else:
        with np.errstate(all="ignore"):
            out = np.asarray(op.compute(args, attrs, elements))
    if node.op == "cast" and not node.type.is_float:
        out = out.astype(_dtype(node.type))
    assert out.shape == shape, f"{node}: {out.shape} {shape}"
    return out
