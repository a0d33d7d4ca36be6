"""Layouts and DTensor placements: the same things under two names.

    R  Replicate()      S(d)  Shard(d)      P  Partial("sum")      L  (there is none)

Both cut uneven lengths alike, so going from one to the other moves no byte.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layouts import Layout, R, S, partial
from penstock.program.mesh import Mesh
from penstock.program.types import Type
from penstock.step.dtypes import name_of

__all__ = ["from_local", "mesh_of", "placements_of", "to_local", "type_of"]


def mesh_of(device_mesh: Any) -> Mesh:
    """Return a DeviceMesh as a mesh; its dimensions must have names."""
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ProgramError(
            "the DeviceMesh has dimensions without names; "
            'write init_device_mesh(..., mesh_dim_names=("dp",))'
        )
    return Mesh(axes=tuple(zip(names, device_mesh.shape, strict=True)))


def placements_of(made: Type, mesh: Mesh) -> tuple[Any, ...]:
    """Return the placements of a value, axis by axis of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    out: list[Any] = []
    for axis in mesh.names:
        layout = made.layout(axis)
        if layout.kind == "L":
            raise ProgramError(f"a value that is local on axis {axis!r} is no DTensor; reduce it")
        if layout.kind == "S":
            out.append(Shard(layout.dim))
        else:
            out.append(Partial(layout.op) if layout.kind == "P" else Replicate())
    return tuple(out)


def type_of(tensor: Any) -> Type:
    """Return what a DTensor is in a program."""
    mesh = mesh_of(tensor.device_mesh)
    layouts = [
        (axis, _layout(placement))
        for axis, placement in zip(mesh.names, tensor.placements, strict=True)
    ]
    shape = tuple(tensor.shape)
    return Type(shape=shape, dtype=name_of(tensor.dtype), layouts=tuple(layouts))


def _layout(placement: Any) -> Layout:
    if placement.is_replicate():
        return R
    if placement.is_shard():
        return S(placement.dim)
    op = str(placement.reduce_op)
    if op not in ("sum", "max", "min"):
        raise ProgramError(f"a DTensor that is partial by {op!r}; redistribute it first")
    return partial(op)


def to_local(tensor: Any, made: Type, name: str) -> torch.Tensor:
    """Return what this rank has of a DTensor, if it lies as the program says."""
    found = type_of(tensor)
    if found != made:
        raise ProgramError(
            f"{name} is a DTensor {found}, the program has {made}; redistribute it, or write the "
            "program for what it is"
        )
    local: torch.Tensor = tensor.to_local()
    return local


def from_local(local: torch.Tensor, made: Type, device_mesh: Any) -> Any:
    """Return what this rank has of a value as a DTensor."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(made.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        device_mesh,
        placements_of(made, mesh_of(device_mesh)),
        run_check=False,
        shape=torch.Size(made.shape),
        stride=strides,
    )
