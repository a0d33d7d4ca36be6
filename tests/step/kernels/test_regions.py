"""Kernels: whichever backend computes a region, its values are those of the interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OptionError, ProgramError
from penstock.step.dtypes import name_of, torch_dtype
from penstock.step.kernels import regions
from penstock.step.kernels import tiled as region_tiled
from penstock.step.kernels.regions import Kernel, kernel_of
from penstock.step.program import L, P, Program, R, S, bf16, f64, interpret, mesh, program
from penstock.step.program import language as lang
from penstock.step.program.language import update
from penstock.step.program.ops import OPS
from penstock.step.program.random import draws, threshold

CPU = ("eager", "tiled", "native")
ADAM = {"lr": 1e-2}


@program
def adam(g: R["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return update(w, w - lr * step)


@program
def lamb(g: R["n"], w: R["n"], m: R["n"], lr):
    m = update(m, 0.9 * m + 0.1 * g)
    u = m + 0.01 * w
    a, b = lang.norm(w), lang.norm(u)
    trust = lang.where(b > 0.0, a / b, 1.0)
    return update(w, w - lr * trust * u), lang.amax(u)


@program
def epilogue(x: R["t", "d"], bias: R["d"], rest: R["t", "d"], scale: R["d"], seed: int):
    y = lang.dropout(x + bias, 0.25, seed) + rest
    return lang.layer_norm(y, scale, bias), lang.amax(y, -1, keep=True)


@program
def sharded(g: P["n", bf16], w: S(0)["n"], m: S(0)["n"], half: R["n", bf16], lr):
    g = lang.reduce_scatter(g, "mean")
    m = update(m, 0.9 * m + g)
    w = update(w, w - lr * m)
    return update(half, lang.all_gather(lang.cast(w, bf16)))


def kernel(made: Program, backend: str, **more: Any) -> Kernel:
    names = [n.name for n in made.nodes if n.op not in ("input", "scalar", "const")]
    return kernel_of(made, names, backend=backend, **more)


def in_place(made: Kernel, held: dict[str, Any], numbers: dict[str, float]) -> list[Any]:
    """Run a kernel with what it updates lying where the states lie."""
    targets = dict(made.body.targets)
    out = [held.get(targets.get(name, "")) for name in made.outputs]
    return made([held[name] for name in made.inputs], numbers, out=out)


def tensors(made: Program, seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        node.name: torch.from_numpy(rng.uniform(0.1, 2, node.type.shape)).to(
            dtype or torch_dtype(node.type.dtype)
        )
        for node in made.inputs
        if node.op == "input"
    }


def reference(made: Program, held: dict[str, Any], numbers: dict[str, Any], **more: Any) -> Any:
    arrays = {name: one.double().numpy() for name, one in held.items()}
    return interpret(made, arrays | numbers, **more)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles small enough that a test has many, the last of them short."""
    monkeypatch.setattr(region_tiled, "TILE_ELEMENTS", 64)


@pytest.mark.parametrize("backend", [*CPU, "auto"])
def test_states_are_updated_in_place_as_the_interpreter_says(backend: str) -> None:
    made = adam.on(mesh(dp=1), n=1003)
    held = tensors(made)
    want = reference(made, held, ADAM | {"t": lambda i: i + 1}, iterations=3)
    one = kernel(made, backend)
    for t in (1, 2, 3):
        assert in_place(one, held, ADAM | {"t": t})[0] is held["m"]
    for state, value in want.states.items():
        assert np.abs(held[state].double().numpy() - value[0]).max() < 1e-5


def test_flat_kernels_have_the_same_bits_in_every_backend() -> None:
    made = adam.on(mesh(dp=1), n=1003)
    found = []
    for backend in CPU:
        held = tensors(made)
        for t in (1, 2):
            in_place(kernel(made, backend), held, ADAM | {"t": t})
        found.append(held)
    for held in found[1:]:
        assert all(torch.equal(held[name], found[0][name]) for name in "wmv")


def test_a_compiled_kernel_serves_new_numbers_and_new_lengths() -> None:
    made = adam.on(mesh(dp=1), n=1003)
    one = kernel(made, "compile")
    held = tensors(made)
    in_place(one, held, ADAM | {"t": 1})
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    part = {name: tensor[:500] for name, tensor in held.items()}
    want = {name: tensor.clone() for name, tensor in part.items()}
    in_place(one, part, {"t": 2, "lr": 0.5})
    in_place(kernel(made, "eager"), want, {"t": 2, "lr": 0.5})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert all(torch.allclose(part[name], want[name], rtol=1e-6, atol=1e-7) for name in "wmv")


POINTWISE = [op for op in OPS.values() if op.kind == "pointwise" and op.name != "dropout"]


@pytest.mark.parametrize("op", POINTWISE, ids=lambda op: op.name)
def test_every_operation_means_in_torch_what_it_means_in_numpy(op: Any) -> None:
    count = op.num_inputs[1]

    @program
    def one(a: R["n"], b: R["n"], c: R["n"]):
        operands = [a - 1.0, b, c - 0.5][-count:] if count < 3 else [a > 1.0, b, c - 0.5]
        if op.name in ("sqrt", "rsqrt", "log", "pow"):
            operands = [a, b][:count]
        attrs = {"dtype": "i64"} if op.name == "cast" else {}
        return a.tracer.add(op.name, operands, attrs)

    made = one.on(mesh(dp=1), n=301)
    held = tensors(made)
    want = reference(made, held, {}).outputs[0][0]
    got = [
        kernel(made, backend)([held[n] for n in kernel(made, backend).inputs], {})[0]
        for backend in CPU
    ]
    assert np.allclose(got[0].double().numpy(), want, rtol=1e-5, atol=1e-6)
    assert name_of(got[0].dtype) == made[made.outputs[0]].type.dtype
    assert all(torch.equal(one, got[0]) for one in got[1:])


def test_numbers_stand_on_either_side() -> None:
    @program
    def one(a: R["n"], s):
        low = lang.minimum(s, a) + lang.maximum(a, 0.5)
        return (2.0 - a) / (s / a) + (a > 1.0) * low + lang.where(a > s, s, a)

    made = one.on(mesh(dp=1), n=301)
    held = tensors(made)
    want = reference(made, held, {"s": 1.1}).outputs[0][0]
    for backend in CPU:
        (got,) = kernel(made, backend)([held["a"]], {"s": 1.1})
        assert np.allclose(got.numpy(), want, rtol=1e-6)


EXPRESSIONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - 2.0 * b,
    lambda a, b: a * b,
    lambda a, b: a / (b * b + 1.0),
    lambda a, b: (a * a).sqrt(),
    lambda a, b: lang.maximum(a, b),
    lambda a, b: lang.where(a > b, a, b * 0.5),
    lambda a, b: -abs(a),
]


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(EXPRESSIONS), st.integers(0, 30), st.integers(0, 30)),
        min_size=1,
        max_size=9,
    ),
    num_updated=st.integers(0, 2),
)
def test_any_region_has_the_same_bits_in_tiles(steps: list[Any], num_updated: int) -> None:
    @program
    def one(a: R["n"], b: R["n"], c: R["n"]):
        values = [a, b, c]
        for step, i, j in steps:
            values.append(step(values[i % len(values)], values[j % len(values)]))
        for state in (a, b)[:num_updated]:
            values.append(update(state, values[len(values) // 2] + values[-1]))
        return values[-1], values[3]

    made = one.on(mesh(dp=1), n=203)
    found = []
    for backend in ("eager", "tiled"):
        held = tensors(made, seed=len(steps))
        results = in_place(kernel(made, backend), held, {})
        found.append([*results, *held.values()])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_two_states_can_change_places() -> None:
    @program
    def swap(a: R["n"], b: R["n"]):
        first = update(a, b)
        return update(b, lang.cast(a, "f32")), first

    made = swap.on(mesh(dp=1), n=203)
    for backend in CPU:
        held = tensors(made)
        want = held["b"].clone(), held["a"].clone()
        in_place(kernel(made, backend), held, {})
        assert torch.equal(held["a"], want[0])
        assert torch.equal(held["b"], want[1])


def test_a_sum_over_everything_takes_two_passes_and_is_right() -> None:
    made = lamb.on(mesh(dp=1), n=1003)
    want = reference(made, tensors(made), {"lr": 0.1})
    for backend in CPU:
        held = tensors(made)
        results = in_place(kernel(made, backend), held, {"lr": 0.1})
        for state, value in want.states.items():
            assert np.allclose(held[state].numpy(), value[0], rtol=1e-5)
        assert np.isclose(float(results[-1]), want.outputs[1][0], rtol=1e-6)


def test_what_a_second_pass_needs_of_a_state_is_kept_before_it_changes() -> None:
    @program
    def one(a: R["n"], b: R["n"]):
        old = a * 2.0 + b
        update(a, b)
        return update(b, old / lang.sum(b))

    made = one.on(mesh(dp=1), n=1003)
    want = reference(made, tensors(made), {})
    for backend in CPU:
        held = tensors(made)
        in_place(kernel(made, backend), held, {})
        for state, value in want.states.items():
            assert np.allclose(held[state].numpy(), value[0], rtol=1e-5)


@pytest.mark.parametrize("backend", CPU)
def test_rows_are_normed_after_dropout_as_the_interpreter_says(backend: str) -> None:
    made = epilogue.on(mesh(dp=1), t=37, d=29)
    held = tensors(made)
    want = reference(made, held, {"seed": (1 << 40) + 3})
    one = kernel(made, backend)
    got = one([held[name] for name in one.inputs], {"seed": (1 << 40) + 3})
    for value, wanted in zip(got, want.outputs, strict=True):
        assert np.allclose(value.numpy(), wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("at", [(0, 0), (5, 0), (5, 7)])
def test_dropout_of_a_block_takes_what_dropout_of_the_whole_takes(
    backend: str, at: tuple[int, int]
) -> None:
    @program
    def one(x: R["t", "d"], seed: int):
        return lang.dropout(x, 0.3, seed) * 1.0

    made = one.on(mesh(dp=1), t=40, d=31)
    x = torch.ones(40, 31)
    block = x[at[0] : at[0] + 20, at[1] : at[1] + (31 if not at[1] else 9)].clone()
    (got,) = kernel(made, backend)([block], {"seed": -5}, starts=at)
    kept = draws(-5, np.arange(40 * 31)).reshape(40, 31) >= threshold(0.3)
    cut = kept[at[0] : at[0] + block.shape[0], at[1] : at[1] + block.shape[1]]
    assert np.array_equal(got.numpy() != 0, cut)


def test_draws_go_on_beyond_32_bits() -> None:
    @program
    def one(x: R["n"], seed: int):
        return lang.dropout(x, 0.5, seed) + 0.0

    first = (1 << 32) - 60
    made = one.on(mesh(dp=1), n=1 << 33)
    kept = draws(9, np.arange(first, first + 200)) >= threshold(0.5)
    for backend in CPU:
        (got,) = kernel(made, backend)([torch.ones(200)], {"seed": 9}, starts=(first,))
        assert np.array_equal(got.numpy() != 0, kept)


def test_narrow_floats_are_computed_wide_and_rounded_once() -> None:
    @program
    def one(a: R["n", bf16], b: R["n", bf16]):
        return update(a, a + b * 0.001 - b * 0.001 + b / 3.0)

    made = one.on(mesh(dp=1), n=403)
    for backend in CPU:
        held = tensors(made)
        a, b = held["a"].float(), held["b"].float()
        want = (a + b * 0.001 - b * 0.001 + b / 3.0).bfloat16()
        in_place(kernel(made, backend), held, {})
        assert torch.equal(held["a"], want)


def test_wide_floats_stay_wide() -> None:
    @program
    def one(a: R["n", f64], s):
        return (a * s).sqrt() + 1e-12

    made = one.on(mesh(dp=1), n=303)
    held = tensors(made)
    want = np.sqrt(held["a"].numpy() * 0.1) + 1e-12
    for backend in CPU:
        (got,) = kernel(made, backend)([held["a"]], {"s": 0.1})
        assert got.dtype == torch.float64
        assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("backend", CPU)
def test_a_kernel_adds_up_what_ranks_have_and_writes_to_all(backend: str) -> None:
    made = sharded.on(mesh(dp=3), n=300)
    rng = np.random.default_rng(3)
    grads = [torch.from_numpy(rng.normal(size=300)).bfloat16() for _ in range(3)]
    w, m = (torch.from_numpy(rng.normal(size=300)).float() for _ in range(2))
    arrays = {"g": [g.double().numpy() for g in grads], "w": w.double().numpy()}
    arrays |= {"m": m.double().numpy(), "half": np.zeros(300)}
    want = interpret(made, arrays | {"lr": 0.1})
    halves = [torch.zeros(300).bfloat16() for _ in range(3)]
    for rank in range(3):
        part = slice(rank * 100, rank * 100 + 100)
        held = {"g": [g[part] for g in grads], "w": w[part], "m": m[part]}
        in_place(kernel(made, backend), held | {"half": [h[part] for h in halves]}, {"lr": 0.1})
    assert np.allclose(w.numpy(), np.concatenate(want.states["w"]), rtol=1e-5, atol=1e-6)
    for half in halves:
        assert torch.equal(half, w.bfloat16())


def test_what_a_rank_has_all_of_is_cut_to_the_block() -> None:
    @program
    def one(part: S(0)["n"], whole: R["n"], bias: R["n"]):
        return part * lang.slice(whole, 0) + bias

    made = one.on(mesh(dp=2), n=200)
    whole, bias = torch.rand(200), torch.rand(200)
    for backend in CPU:
        (got,) = kernel(made, backend)([torch.ones(100), whole, bias], {}, starts=(100,))
        assert torch.equal(got, (whole + bias)[100:])


def test_results_may_go_to_memory_that_inputs_only_partly_share() -> None:
    @program
    def one(a: R["n"]):
        return a * 2.0 + 1.0

    made = one.on(mesh(dp=1), n=300)
    for backend in CPU:
        memory = torch.rand(400)
        want = memory[:300] * 2.0 + 1.0
        kernel(made, backend)([memory[:300]], {}, out=[memory[50:350]])
        assert torch.equal(memory[50:350], want)
        columns = torch.zeros(300, 2)
        a = torch.rand(300)
        kernel(made, backend)([a], {}, out=[columns[:, 1]])
        assert torch.equal(columns[:, 1], a * 2.0 + 1.0)


def test_shapes_that_only_torch_sorts_out_are_left_to_it() -> None:
    @program
    def one(a: R["t", "d"], b: R["t"]):
        rows = lang.sum(a, 0)
        return rows * 2.0, lang.transpose(a) * b

    made = one.on(mesh(dp=1), t=5, d=7)
    held = tensors(made)
    want = reference(made, held, {})
    for backend in (*CPU, "auto"):
        got = kernel(made, backend)([held["a"], held["b"]], {})
        for value, wanted in zip(got, want.outputs, strict=True):
            assert np.allclose(value.numpy(), wanted[0], rtol=1e-5)


def test_empty_blocks_are_nothing_to_do() -> None:
    made = adam.on(mesh(dp=1), n=1003)
    for backend in CPU:
        held = {name: tensor[:0] for name, tensor in tensors(made).items()}
        assert [x.numel() for x in in_place(kernel(made, backend), held, ADAM | {"t": 1})] == [
            0
        ] * 3


def test_without_a_compiler_kernels_run_in_tiles_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regions, "c_compiler", lambda: None)
    monkeypatch.setattr(regions, "_said", set())
    made = adam.on(mesh(dp=1), n=303)
    held = tensors(made)
    with caplog.at_level(logging.WARNING, "penstock.step"):
        for t in (1, 2):
            in_place(kernel(made, "auto"), held, ADAM | {"t": t})
    assert [r.message for r in caplog.records if "no C compiler" in r.message] == [
        "no C compiler was found: kernels run in tiles, about 4 times slower"
    ]


def test_what_cannot_be_a_kernel_is_refused() -> None:
    @program
    def moving(g: P["n"], w: R["n"]):
        g = lang.all_reduce(g * 2.0)
        return g + w

    made = moving.on(mesh(dp=2), n=10)
    with pytest.raises(ProgramError, match="may begin with a reduction"):
        kernel(made, "tiled")
    with pytest.raises(OptionError, match="no backend 'fast'"):
        kernel(adam.on(mesh(dp=1), n=10), "fast")
    one = kernel(adam.on(mesh(dp=1), n=10), "tiled")
    with pytest.raises(ProgramError, match="reads 4 tensors"):
        one([torch.ones(10)], {"lr": 1.0, "t": 1})
    with pytest.raises(ProgramError, match="needs a number for t"):
        one([torch.ones(10)] * 4, {"lr": 1.0})


def test_a_local_value_is_a_value_like_others() -> None:
    @program
    def one(a: L["n"]):
        return a * 2.0 - 1.0

    made = one.on(mesh(dp=2), n=10)
    (got,) = kernel(made, "tiled")([torch.ones(10)], {})
    assert torch.equal(got, torch.ones(10))
