"""Layouts and DTensor placements are the same things, and cut uneven lengths alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import ProgramError

SHAPE = (7, 5)
WHOLE = torch.arange(35.0).view(SHAPE)


@ps.program
def doubled(
    rows: ps.S(0)["n", "k"], columns: ps.S(1)["n", "k"], whole: ps.R["n", "k"], part: ps.P["n", "k"]
):
    most = ps.amax(rows, 0)
    return rows * 2.0, columns * 2.0, whole * 2.0, part * 2.0, ps.sum(rows), most


def both_ways(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    program = doubled.on(ps.mesh(dp=size), n=7, k=5)
    device_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    expected = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "part": Partial("sum")}
    given = {}
    for name, placement in expected.items():
        assert ps.placements_of(program, name, device_mesh) == (placement,)
        given[name] = distribute_tensor(WHOLE, device_mesh, [placement])
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
        outputs = step(**given)
        for name, one in zip(program.outputs[:4], outputs, strict=False):
            made = ps.as_dtensor(one, program, name, device_mesh)
            assert isinstance(made, DTensor)
            assert made.shape == SHAPE
            assert torch.equal(made.full_tensor(), 2 * WHOLE)
            assert made.to_local().data_ptr() == one.data_ptr()
        total, most = (
            ps.as_dtensor(one, program, name, device_mesh).full_tensor()
            for name, one in zip(program.outputs[4:], outputs[4:], strict=True)
        )
        assert total == WHOLE.sum()
        assert torch.equal(most, WHOLE.amax(0))


@pytest.mark.parametrize("size", [1, 3])
def test_a_layout_is_a_placement(size: int) -> None:
    run_ranks(both_ways, size)


@ps.program
def kept(
    x: ps.S(0).over("dp") & ps.S(0).over("tp")["n", "k"],
    w: ps.S(1).over("dp") & ps.R.over("tp")["n", "k"],
    y: ps.R["n", "k"],
):
    w = ps.update(w, w + 1.0)
    z = y * 2.0 + 1.0
    q = z * 3.0
    return x * 2.0, q


def on_two_axes(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    program = kept.on(ps.mesh(dp=2, tp=2), n=7, k=5)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    x = distribute_tensor(WHOLE, both, [Shard(0), Shard(0)])
    w = torch.nn.Parameter(distribute_tensor(WHOLE, both["dp"], [Shard(1)]))
    late = distribute_tensor(WHOLE, both["tp"], [Shard(0)])
    fused = program.fuse("z", "q")
    with ps.Groups(program.mesh) as groups, ps.compile(fused, groups) as step:
        # What is still on its way when it is given; the memory of a state is the parameter's.
        late = late.redistribute(placements=[Replicate()], async_op=True)
        one, other = step(x=x, w=w, y=late)
        made = ps.as_dtensor(one, step.program, step.program.outputs[0], both)
        assert torch.equal(made.full_tensor(), 2 * WHOLE)
        assert torch.equal(other, 6 * WHOLE + 3)
        assert torch.equal(w.full_tensor(), WHOLE + 1)

        # All ranks are told, not those alone whose slices have another shape.
        with pytest.raises(ProgramError, match="at other places along 'tp'"):
            step(x=x, w=distribute_tensor(WHOLE, turned, [Replicate(), Shard(1)]), y=late)
        with pytest.raises(ProgramError, match="at other places along 'tp'"):
            ps.as_dtensor(one, program, "x", turned)
        with pytest.raises(ProgramError, match="no dimension 'dp'"):
            ps.placements_of(program, "x", both["tp"])
        strided = x.from_local(x.to_local(), both, [_StridedShard(0, split_factor=2), Shard(0)])
        with pytest.raises(ProgramError, match=r"_StridedShard.*which no layout has"):
            step(x=strided, w=w, y=late)


def test_a_device_mesh_has_its_ranks_where_the_program_has_them() -> None:
    run_ranks(on_two_axes, 4)


@ps.program
def apart(x: ps.S(0)["n", "k"], own: ps.L["n"]):
    return x * 2.0, own * 2.0


def refused(rank: int, size: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    program = apart.on(ps.mesh(dp=size), n=7, k=5)
    meshes = {
        names: init_device_mesh("cpu", (size,), mesh_dim_names=names)
        for names in (("dp",), ("data",), None)
    }
    good, said = meshes["dp",], []
    x, own = distribute_tensor(WHOLE, good, [Shard(0)]), torch.ones(7)

    def told(call: Any, *args: Any, **given: Any) -> None:
        with pytest.raises(ProgramError) as error:
            call(*args, **given)
        said.append(str(error.value))

    with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
        told(step, x=x.redistribute(placements=[Shard(1)]), own=own)
        told(step, x=x.double(), own=own)
        told(step, x=distribute_tensor(WHOLE[:6], good, [Shard(0)]), own=own)
        told(step, x=x, own=DTensor.from_local(own, good, [Partial()]))
        told(step, x=DTensor.from_local(WHOLE, good, [Partial("avg")]), own=own)
        for names in (("data",), None):
            told(step, x=distribute_tensor(WHOLE, meshes[names], [Shard(0)]), own=own)
        one, two = step(x=x, own=own)
        told(ps.as_dtensor, one, program, "x", meshes["data",])
        told(ps.as_dtensor, two, program, program.outputs[1], good)
        told(ps.as_dtensor, WHOLE, program, "x", good)
        told(ps.as_dtensor, one, program, "z", good)
    return said


def test_what_does_not_fit_is_refused_with_the_way_out() -> None:
    first, second = run_ranks(refused, 2)
    for said, part in zip(
        first,
        (
            "x.redistribute(placements=[Shard(dim=0)])",
            "cast it to torch.float32",
            "x is a DTensor f32[6×5] dp:S(0), the program has f32[7×5] dp:S(0); give one of that",
            "give own as a plain tensor",
            "the placement Partial(avg), which no layout has",
            "has no axis 'data'; call it as there",
            "write init_device_mesh(..., mesh_dim_names=('dp',))",
            "has no axis 'data'; call it as there",
            "is local on axis 'dp'",
            "was given torch.float32 of shape (7, 5) for x (f32[7×5] dp:S(0)), of which rank 0 has",
            "has no value 'z'",
        ),
        strict=True,
    ):
        assert part in said
    assert [said.replace("rank 1", "rank 0") for said in second][:9] == first[:9]
