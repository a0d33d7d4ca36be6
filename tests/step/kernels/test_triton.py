"""Kernels for CUDA: their text is checked everywhere, what they compute where there is a GPU."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.kernels.test_regions import adam, epilogue, in_place, kernel, lamb, sharded, tensors

from penstock.errors import ProgramError
from penstock.step.kernels.body import body_of
from penstock.step.kernels.call import call_of
from penstock.step.kernels.stages import stages_of
from penstock.step.kernels.triton import can_run
from penstock.step.kernels.triton_text import kernel_text
from penstock.step.kernels.triton_tune import configs_of
from penstock.step.program import Program, R, f64, mesh, program
from penstock.step.program import language as lang

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: kernels are emitted, NOT run; see benchmarks/kernels_gpu.py",
)


def text_of(made: Program) -> str:
    """Return a program as one text; reductions and gathers have a pointer for each rank."""
    nodes = [n.name for n in made.nodes if n.op not in ("input", "scalar", "const")]
    body = body_of(made, nodes)
    moves = [made[name] for name in nodes if made[name].axes]
    sizes = {n.inputs[0]: made.mesh.size(*n.axes) for n in moves}
    widths = {name: sizes[name] for name, _ in body.addends}
    gathered = [made.mesh.size(*n.axes) for n in moves if n.inputs[0] not in widths]
    widths |= {f"out {name}": max(gathered) for name in body.copies}
    return "\n\n".join(kernel_text(body, stage, widths).text for stage in stages_of(body))


def functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def lines(text: str, start: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(start)]


ADAM_BODY = """\
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    m = tl.load(m_at + at, mask=mask).to(tl.float32)
    g = tl.load(g_at + at, mask=mask).to(tl.float32)
    v = tl.load(v_at + at, mask=mask).to(tl.float32)
    w = tl.load(w_at + at, mask=mask).to(tl.float32)
    mul_1 = b1_number * m
    mul_2 = sub_1_number * g
    add_1 = mul_1 + mul_2
    mul_3 = b2_number * v
    mul_4 = sub_2_number * g
    mul_5 = mul_4 * g
    add_2 = mul_3 + mul_5
    div_1 = tl.div_rn(add_1, sub_3_number)
    div_2 = tl.div_rn(add_2, sub_4_number)
    sqrt_1 = tl.sqrt_rn(div_2)
    add_3 = sqrt_1 + eps_number
    step = tl.div_rn(div_1, add_3)
    mul_6 = lr_number * step
    sub_5 = w - mul_6
    tl.store(out_m_update_at + at, add_1.to(tl.float32), mask=mask)
    tl.store(out_v_update_at + at, add_2.to(tl.float32), mask=mask)
    tl.store(out_update_1_at + at, sub_5.to(tl.float32), mask=mask)
"""


def test_adam_is_one_kernel_that_reads_and_writes_everything_once() -> None:
    text = text_of(adam.on(mesh(dp=1), n=1000))
    assert text.endswith(ADAM_BODY)
    assert len(functions(text)) == 1


def test_the_text_is_a_function_of_the_program_alone() -> None:
    first, second = (text_of(adam.on(mesh(dp=1), n=n)) for n in (1000, 77))
    assert first == second


def test_lamb_is_two_passes_and_the_second_computes_again_from_what_was_stored() -> None:
    text = text_of(lamb.on(mesh(dp=1), n=1000))
    first, second = functions(text)
    assert [first.name, second.name] == ["lamb_0", "lamb_1"]
    assert "for begin in range" in ast.unparse(first)
    loaded = lines(ast.unparse(second), "m_update = tl.load(m_update_at")
    assert loaded
    assert "tl.load(g_at" not in ast.unparse(second)


def test_a_fused_collective_has_a_pointer_for_each_rank() -> None:
    text = text_of(sharded.on(mesh(dp=4), n=1000))
    (function,) = functions(text)
    names = [arg.arg for arg in function.args.args]
    assert [n for n in names if n.startswith("g_at")] == [f"g_at_{k}" for k in range(4)]
    assert len(lines(text, "tl.store(out_update_1_at_")) == 4
    assert "g = tl.div_rn(g, 4.0)" in text


def test_rows_are_reduced_under_a_mask() -> None:
    text = text_of(epilogue.on(mesh(dp=1), t=64, d=100))
    (function,) = functions(text)
    assert "n: tl.constexpr" in ast.unparse(function)
    assert lines(text, "sum_1 = tl.sum(tl.where(col_mask, ")


def test_numbers_that_32_bits_do_not_hold_are_handed_over() -> None:
    @program
    def one(a: R["n"]):
        return a * 1e-60 + lang.maximum(a, float("-inf"))

    text = text_of(one.on(mesh(dp=1), n=10))
    assert "a * const_1e_60_number" in text
    assert "tl.maximum(a, const__inf_number" in text


def test_names_of_the_user_do_not_meet_names_of_the_text() -> None:
    @program
    def one(at: R["n"], mask: R["n"], tl: R["n"]):
        n = at + mask
        return n * tl

    names = [a.arg for f in functions(text_of(one.on(mesh(dp=1), n=10))) for a in f.args.args]
    assert len(set(names)) == len(names)
    assert "at_2 = tl.load(at_at + at, mask=mask)" in text_of(one.on(mesh(dp=1), n=10))


def test_what_has_no_form_for_cuda_is_refused() -> None:
    @program
    def wide(a: R["n", f64]):
        return a * 2.0

    with pytest.raises(ProgramError, match="no elements of f64; use another backend"):
        text_of(wide.on(mesh(dp=1), n=10))


def test_rows_that_no_program_can_hold_are_left_to_torch() -> None:
    for length, can in ((16 * 1024, True), (16 * 1024 + 1, False)):
        body = kernel(epilogue.on(mesh(dp=1), t=2, d=length), "triton").body
        given = [torch.empty(body.types[name].shape) for name in body.inputs]
        assert can_run(body, call_of(body, given, {}, None, None)) is can


def test_every_choice_of_tiles_covers_a_block() -> None:
    for kind, row in (("flat", 1), ("rows", 100), ("rows", 4096), ("rows", 16384)):
        for config in configs_of(kind, row, 1):
            sizes = dict(config.sizes)
            rows = 1000 // row if kind == "rows" else 1000
            programs = config.num_programs(rows * row, row, has_totals=False)
            assert programs * sizes.get("ROWS", sizes.get("BLOCK", 0)) >= rows
            assert sizes.get("COLS", row) >= row


# -- on a GPU ----------------------------------------------------------------------------------


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [x.cuda() for x in one] if isinstance(one, list) else one.cuda()
        for name, one in given.items()
    }


@needs_gpu
@pytest.mark.parametrize("template", [adam, lamb], ids=lambda t: t.name)
def test_kernels_on_a_gpu_compute_what_kernels_on_a_cpu_do(template: Any) -> None:
    made = template.on(mesh(dp=1), n=100_003)
    numbers = {"lr": 0.1, "t": 2}
    here, there = tensors(made), on_gpu(tensors(made))
    in_place(kernel(made, "native"), here, numbers)
    in_place(kernel(made, "triton"), there, numbers)
    for name in made.states:
        if template is adam:
            assert torch.equal(here[name], there[name].cpu())
        assert torch.allclose(here[name], there[name].cpu(), rtol=1e-5)


@needs_gpu
def test_dropout_on_a_gpu_takes_what_dropout_on_a_cpu_takes() -> None:
    made = epilogue.on(mesh(dp=1), t=333, d=1000)
    here = tensors(made)
    there = on_gpu(here)
    one, other = kernel(made, "eager"), kernel(made, "triton")
    want = one([here[n] for n in one.inputs], {"seed": 1 << 41}, starts=(0, 0))
    got = other([there[n] for n in other.inputs], {"seed": 1 << 41}, starts=(0, 0))
    for a, b in zip(got, want, strict=True):
        assert np.allclose(a.cpu().numpy(), b.numpy(), rtol=1e-3, atol=1e-4)


@needs_gpu
def test_a_kernel_on_a_gpu_adds_up_what_ranks_have_and_writes_to_all() -> None:
    made = sharded.on(mesh(dp=3), n=300)
    rng = np.random.default_rng(3)
    given: dict[str, Any] = {
        name: torch.from_numpy(rng.normal(size=100)).float() for name in ("w", "m")
    }
    given["g"] = [torch.from_numpy(rng.normal(size=100)).bfloat16() for _ in range(3)]
    given["half"] = [torch.zeros(100).bfloat16() for _ in range(3)]
    there = on_gpu(given)
    in_place(kernel(made, "native"), given, {"lr": 0.1})
    in_place(kernel(made, "triton"), there, {"lr": 0.1})
    assert torch.equal(given["w"], there["w"].cpu())
    assert all(torch.equal(half.cpu(), given["half"][0]) for half in there["half"])
