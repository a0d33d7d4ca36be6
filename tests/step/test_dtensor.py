"""Layouts and DTensor placements are the same things, and cut uneven lengths alike."""

from __future__ import annotations

import pytest
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.program.types import Type

SHAPE = (7, 5)


def both_ways(rank: int, size: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from penstock.step.dtensor import from_local, mesh_of, placements_of, to_local, type_of

    device_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    mesh = mesh_of(device_mesh)
    whole = torch.arange(35.0).view(SHAPE)
    said = []
    for layout, placement in ((ps.S(0), Shard(0)), (ps.S(1), Shard(1)), (ps.R, Replicate())):
        made = Type(shape=SHAPE, layouts=(("dp", layout),))
        theirs = distribute_tensor(whole, device_mesh, [placement])
        assert placements_of(made, mesh) == (placement,)
        assert type_of(theirs) == made
        local = to_local(theirs, made, "x")
        assert tuple(local.shape) == made.local_shape(mesh, rank)
        assert torch.equal(from_local(local, made, device_mesh).full_tensor(), whole)
        said.append(str(made))
    partial = Type(shape=SHAPE, layouts=(("dp", ps.P),))
    assert torch.equal(from_local(whole, partial, device_mesh).full_tensor(), whole * size)
    with pytest.raises(ProgramError, match="is no DTensor"):
        placements_of(Type(shape=SHAPE, layouts=(("dp", ps.L),)), mesh)
    with pytest.raises(ProgramError, match="redistribute"):
        to_local(theirs, partial, "x")
    return said


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layout_is_a_placement(size: int) -> None:
    assert run_ranks(both_ways, size)[0] == ["f32[7×5] dp:S(0)", "f32[7×5] dp:S(1)", "f32[7×5] R"]


def as_input(rank: int, size: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    @ps.program
    def total(x: ps.S(0)["n", "k"]):
        return ps.all_reduce(ps.sum(x))

    program = total.on(ps.mesh(dp=size), n=7, k=5)
    device_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    x = distribute_tensor(torch.arange(35.0).view(SHAPE), device_mesh, [Shard(0)])
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
        return float(step(x=x)[0])


def test_a_step_takes_dtensors() -> None:
    assert run_ranks(as_input, 2) == [595.0, 595.0]
