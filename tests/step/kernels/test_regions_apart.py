"""Fused regions whose values have different parts: each is written, by every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.kernels import tiled as region_tiled
from penstock.step.kernels.regions import kernel_of
from penstock.step.program.nodes import Program, Region
from penstock.step.program.passes.regions import with_region

BACKENDS = ("eager", "tiled", "native")
SEED = 3


@ps.program
def sliced(x: ps.R[1]):
    y = ps.sigmoid(x)
    z = ps.slice(y, 0)
    return ps.sum(z), z, y


@ps.program
def scaled(x: ps.S(0)[1], s: ps.R[1]):
    y = ps.sigmoid(s)
    return x * y, y


@ps.program
def most(x: ps.S(0)[1]):
    y = x * 2.0
    return ps.amax(y), y


@ps.program
def no_columns(x: ps.S(1)[4, 1]):
    y = x * 2.0
    return ps.sum(y, 1), y


@ps.program
def swapped(x: ps.S(0)[1], a: ps.R[1], b: ps.R[1]):
    return ps.update(a, b), ps.update(b, a), x * b


@ps.program
def one_dropped(x: ps.R[3], c: ps.R[3], seed):
    d = ps.dropout(ps.sum(x, 0), 0.25, seed)
    return d, d / c


@ps.program
def few_dropped(x: ps.R[1, 1], c: ps.S(0)[7, 7], seed):
    d = ps.dropout(x * 2.0, 0.25, seed)
    return d, ps.dropout(c, 0.5, seed) * d


@ps.program
def rows_of_dropped(x: ps.S(1)[4, 8], seed):
    return ps.sum(ps.dropout(x, 0.5, seed), 1, keep=True)


@ps.program
def rows_less_of_dropped(x: ps.S(1)[4, 8], seed):
    return ps.sum(ps.dropout(x, 0.5, seed), 1)


@ps.program
def all_inside(r: ps.S(0)[7, 1], c: ps.R[5]):
    return ps.sum(r + c, 1)


@ps.program
def all_summed(x: ps.R[8], w: ps.S(0)[8]):
    return x * w, ps.sum(x)


@ps.program
def rows_summed(x: ps.R[4, 8], w: ps.S(1)[4, 8]):
    return ps.sum(x, 1, keep=True), x * w


@ps.program
def no_columns_of_it(x: ps.S(1)[4, 8], c: ps.R[8]):
    total = ps.sum(x)
    return total, c * total


@ps.program
def squared(x: ps.R[3, 3]):
    return ps.sum(x, 1) * ps.sum(x, 1, keep=True)


CASES = (sliced, scaled, most, no_columns, swapped, one_dropped, few_dropped)
CASES += (rows_of_dropped, rows_less_of_dropped, all_inside, all_summed)
CASES += (rows_summed, no_columns_of_it, squared)


def fused(made: Program) -> Program:
    """Return a program as one kernel, whatever `fuse` itself refuses."""
    leaves = ("input", "scalar", "const")
    nodes = tuple(node.name for node in made.nodes if node.op not in leaves)
    return with_region(
        made, Region(name="all", kind="fuse", nodes=nodes, attrs=(("form", "compute"),))
    )


def off(made: Program, groups: ps.Groups, rank: int, backend: str) -> list[str]:
    """Return which results of a program are not those of the interpreter."""
    rng = np.random.default_rng(0)
    whole: dict[str, Any] = {
        node.name: SEED if node.op == "scalar" else rng.uniform(0.5, 2, node.type.shape)
        for node in made.inputs
    }
    given = {
        node.name: whole[node.name]
        if node.op == "scalar"
        else torch.tensor(
            whole[node.name][tuple(slice(*b) for b in node.type.bounds(made.mesh, rank))],
            dtype=torch.float32,
        )
        for node in made.inputs
    }
    wanted = ps.interpret(made, whole)
    with ps.compile(made, groups, backend=backend) as step:
        found = step(**given)
    found = found if isinstance(found, tuple | list) else (found,)
    return [
        f"{made.name} {backend} {name}: {one.tolist()}, not {want[rank].tolist()}"
        for name, one, want in zip(made.outputs, found, wanted.outputs, strict=True)
        if not np.allclose(one.numpy(), want[rank], rtol=1e-5)
    ]


def _work(rank: int, size: int) -> list[str]:
    mesh = ps.mesh(dp=size)
    with ps.Groups(mesh) as groups:
        return [
            said
            for case in CASES
            for backend in BACKENDS
            for said in off(fused(case.on(mesh)), groups, rank, backend)
        ]


def test_every_value_is_written_whichever_parts_a_rank_has() -> None:
    assert run_ranks(_work, 2) == [[], []]


def test_dropout_of_another_shape_is_refused_by_a_kernel_alone() -> None:
    made = one_dropped.on(ps.mesh(dp=1))
    names = [node.name for node in made.nodes if node.op not in ("input", "scalar", "const")]
    kernel = kernel_of(made, names, backend="eager")
    with pytest.raises(ProgramError, match=r"in a kernel over \(3,\); leave it out"):
        kernel([torch.ones(3), torch.ones(3)], {"seed": SEED})


@ps.program
def biased(x: ps.R[40, 3], b: ps.R[3]):
    y = x + b
    return y, ps.update(b, b * 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_all_rows_read_changes_after_the_last(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_tiled, "TILE_ELEMENTS", 8)
    made = biased.on(ps.mesh(dp=1))
    x, b, y = torch.rand(40, 3), torch.rand(3), torch.empty(40, 3)
    wanted = [x + b, b * 0.5]
    kernel_of(made, ["y", "mul.1", "update.1"], outputs=made.outputs, backend=backend)(
        [x, b], {}, out=[y, b]
    )
    assert torch.equal(y, wanted[0])
    assert torch.equal(b, wanted[1])


@ps.program
def decayed(x: ps.R[40], s: ps.R[()]):
    return x * ps.sum(x) * s, ps.update(s, ps.cast(s * 0.5, ps.f32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_a_second_pass_reads_changes_after_it(backend: str) -> None:
    made = decayed.on(ps.mesh(dp=1))
    x, s = torch.rand(40), torch.tensor(2.0)
    wanted = x * x.sum() * s
    names = [node.name for node in made.nodes if node.op not in ("input", "const")]
    kernel = kernel_of(made, names, outputs=made.outputs, backend=backend)
    (made_of_x, _) = kernel([x, s], {}, out=[torch.empty(40), s])
    assert torch.allclose(made_of_x, wanted)
    assert s.item() == 1.0
