"""Layouts and DTensor placements: the same things under two names.

    R  Replicate()      S(d)  Shard(d)      P  Partial("sum")      L  (none)

Both cut uneven lengths alike, so converting one to the other moves no byte. Axes of a mesh are
dimensions of a DeviceMesh with the same names, and the same ranks in the same positions; a
DeviceMesh may have fewer of them, as `device_mesh["dp"]` has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.step.dtypes import name_of, torch_dtype
from penstock.step.program.layouts import Layout, R, S, partial
from penstock.step.program.mesh import Mesh
from penstock.step.program.nodes import Program
from penstock.step.program.types import Type

__all__ = ["as_dtensor", "local_of", "placements_of"]

_KNOWN_MAX = 64
"""Pairs of meshes whose comparison is cached."""


def placements_of(program: Program, name: str, device_mesh: Any) -> tuple[Any, ...]:
    """Return the placements that a program needs of an input, or gives to an output.

        x = distribute_tensor(x, device_mesh, placements_of(program, "x", device_mesh))

    Args:
        program: the program that is compiled, with its schedule.
        name: of an input, a state or an output.
        device_mesh: of the program's ranks, with dimensions named as its axes.
    """
    return _placements(program[name].type, program.mesh, device_mesh, name)


def as_dtensor(tensor: torch.Tensor, program: Program, name: str, device_mesh: Any) -> Any:
    """Return what this rank has of a value as a DTensor, in the same memory.

        (w,) = step(g=g, w=w, lr=lr)
        w = as_dtensor(w, step.program, step.program.outputs[0], device_mesh)

    Args:
        tensor: a result of a step, or a state.
        program: the step's.
        name: of the value.
        device_mesh: of the program's ranks, with dimensions named as its axes.
    """
    from torch.distributed.tensor import DTensor

    made = program[name].type
    placements = _placements(made, program.mesh, device_mesh, name)
    rank, is_one = device_mesh.get_rank(), isinstance(tensor, DTensor)
    shape, dtype = made.local_shape(program.mesh, rank), torch_dtype(made.dtype)
    if is_one or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        what = "a DTensor" if is_one else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ProgramError(
            f"as_dtensor was given {what} for {name} ({made}), of which rank {rank} has {dtype} of "
            f"shape {shape}; give what the step has returned under this name"
        )
    return DTensor.from_local(
        tensor,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(made.shape),
        stride=torch.empty(made.shape, device="meta").stride(),
    )


def local_of(value: Any, made: Type, mesh: Mesh, name: str) -> Any:
    """Return this rank's part of an input: of a DTensor, if it has the right placements."""
    if hasattr(value, "device_mesh"):
        found = _found(value, mesh, name)
        if found != made:
            way_out = _way_out(value, made, name)
            raise ProgramError(f"{name} is a DTensor {found}, the program has {made}; {way_out}")
        value = value.to_local()
    # A tensor that torch is still gathering has no memory of its own until it is waited for.
    wait = getattr(value, "wait", None)
    return value if wait is None else wait()


def _way_out(value: Any, made: Type, name: str) -> str:
    if tuple(value.shape) != made.shape:
        return "give one of that shape, or write the program for this one"
    if value.dtype != torch_dtype(made.dtype):
        return f"cast it to {torch_dtype(made.dtype)}, or write the program for what it is"
    names = value.device_mesh.mesh_dim_names
    away = [axis for axis, _ in made.layouts if axis not in names]
    if away:
        return f"put it on a DeviceMesh with a dimension {away[0]!r}"
    if made.axes("L"):
        return f"give {name} as a plain tensor: no placement says that ranks have different values"
    wanted = ", ".join(repr(_placement(made.layout(axis))) for axis in names)
    return f"write {name}.redistribute(placements=[{wanted}]), or write the program for what it is"


def _placements(made: Type, mesh: Mesh, device_mesh: Any, name: str) -> tuple[Any, ...]:
    _check_fits(device_mesh, mesh, name)
    axes = device_mesh.mesh_dim_names
    for axis, layout in made.layouts:
        if layout.kind == "L":
            raise ProgramError(
                f"{name} is local on axis {axis!r}: ranks have values of their own, which no "
                "DTensor can express; keep it as it is, or all_gather or reduce it in the program"
            )
        if axis not in axes and mesh.size(axis) > 1:
            raise ProgramError(
                f"{name} is {made}, and the DeviceMesh has no dimension {axis!r}, but {list(axes)}"
            )
    return tuple(_placement(made.layout(axis)) for axis in axes)


def _placement(layout: Layout) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if layout.kind == "S":
        return Shard(layout.dim)
    return Partial(layout.op) if layout.kind == "P" else Replicate()


def _found(tensor: Any, mesh: Mesh, name: str) -> Type:
    """Return the type that a DTensor has in a program."""
    _check_fits(tensor.device_mesh, mesh, name)
    pairs = zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
    layouts = [(axis, _layout(one, name)) for axis, one in pairs if axis in mesh.names]
    shape = tuple(tensor.shape)
    return Type(shape=shape, dtype=name_of(tensor.dtype), layouts=tuple(layouts))


def _layout(placement: Any, name: str) -> Layout:
    from torch.distributed.tensor import Partial, Replicate, Shard

    # Subclasses of these mean something else, such as slices in another order of axes.
    kind = type(placement)
    if kind is Replicate:
        return R
    if kind is Shard:
        return S(placement.dim)
    if kind is Partial and placement.reduce_op in ("sum", "max", "min"):
        return partial(placement.reduce_op)
    raise ProgramError(
        f"{name} is a DTensor with the placement {placement!r}, which no layout has; redistribute "
        "it to Replicate, Shard or a Partial of sum, max or min"
    )


def _check_fits(device_mesh: Any, mesh: Mesh, name: str) -> None:
    why = _misfit(device_mesh, mesh)
    if why:
        raise ProgramError(f"{name} and the DeviceMesh: {why}")


@lru_cache(_KNOWN_MAX)
def _misfit(device_mesh: Any, mesh: Mesh) -> str:
    """Return why a DeviceMesh does not have the ranks of a mesh in its order; empty if it does.

    The answer is the same on all ranks, so that none continues alone.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        said = ", ".join(map(repr, mesh.names))
        return (
            f"its dimensions have no names; write init_device_mesh(..., mesh_dim_names=({said},))"
        )
    ranks = np.array(device_mesh.mesh.tolist())
    if ranks.size and int(ranks.max()) >= mesh.num_ranks:
        return f"it has rank {ranks.max()}, the program's mesh ({mesh}) has {mesh.num_ranks} ranks"
    places = np.unravel_index(ranks, [size for _, size in mesh.axes])
    for dim, axis in enumerate(names):
        size = ranks.shape[dim]
        if axis not in mesh.names:
            if size > 1:
                return f"the program's mesh ({mesh}) has no axis {axis!r}; call it as there"
            continue
        if size != mesh.size(axis):
            return f"{axis!r} has {size} ranks there and {mesh.size(axis)} in the program"
        along = np.arange(size).reshape([-1 if d == dim else 1 for d in range(ranks.ndim)])
        if not np.array_equal(places[mesh.names.index(axis)], np.broadcast_to(along, ranks.shape)):
            return (
                f"ranks are at other places along {axis!r} than in the program's mesh ({mesh}); "
                "name its axes in the same order"
            )
    return ""
