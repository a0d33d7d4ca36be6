"""Functions become programs: names, types, defaults, and the user's line in every error."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ProgramError
from penstock.step.program import L, P, R, S, Type, bf16, i64, interpret, mesh, program, u8
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    amax,
    call,
    cast,
    dropout,
    gelu,
    layer_norm,
    load,
    mean,
    norm,
    recv,
    reduce_scatter,
    send,
    softmax,
    store,
    sum,
    transpose,
    update,
    where,
)


@program
def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = all_reduce(g, "mean")
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    return update(w, w - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps))


def test_a_program_has_the_names_that_its_author_gave() -> None:
    made = adam.on(mesh(dp=2), n=10)
    assert made["g.all_reduce"].op == "all_reduce"
    assert made.find("g", "all_reduce").name == "g.all_reduce"
    assert set(made.states) == {"m", "v", "w"}
    assert dict(made.defaults) == {"b1": 0.9, "b2": 0.999, "eps": 1e-8}


def test_a_program_prints_one_value_a_line_with_its_layout() -> None:
    lines = str(adam.on(mesh(dp=2), n=10)).splitlines()
    assert lines[0] == "program adam on dp=2"
    assert "  g = input()  # f32[10] dp:P" in lines
    assert "  g.all_reduce = all_reduce(g, axis='dp', op='mean')  # f32[10] R" in lines


def test_equal_programs_have_equal_digests_and_others_do_not() -> None:
    assert adam.on(mesh(dp=2), n=10).digest == adam.on(mesh(dp=2), n=10).digest
    assert adam.on(mesh(dp=2), n=10).digest != adam.on(mesh(dp=2), n=11).digest
    assert adam.on(mesh(dp=2), n=10).digest != adam.on(mesh(dp=4), n=10).digest


def test_a_program_can_be_used_in_another_one() -> None:
    @program
    def outer(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr):
        return adam(g, w, m, v, t, lr, 0.9, 0.999, 1e-8)

    given = {"g": [np.ones(4), np.zeros(4)], "w": np.ones(4), "m": np.zeros(4), "v": np.zeros(4)}
    given |= {"t": 1, "lr": 0.1}
    mine = interpret(outer.on(mesh(dp=2), n=4), given).states["w"][0]
    assert np.allclose(mine, interpret(adam.on(mesh(dp=2), n=4), given).states["w"][0])


def test_numbers_do_not_widen_tensors() -> None:
    @program
    def scaled(x: R["n", bf16], y: R["n", u8], k):
        return x * 2.0, x * k, y + 1, y * 0.5, x + y

    made = scaled.on(mesh(dp=1), n=3)
    assert [made[o].type.dtype for o in made.outputs] == ["bf16", "bf16", "u8", "f32", "bf16"]


def test_a_value_has_a_layout_for_each_axis() -> None:
    @program
    def both(x: S(0).over("dp") & S(1).over("tp")["a", "b"], w: S(0).over("tp")["b", "c"]):
        return x @ w

    made = both.on(mesh(dp=2, tp=2), a=4, b=6, c=5)
    assert str(made[made.outputs[0]].type) == "f32[4×5] dp:S(0) tp:P"


def test_the_language_has_what_a_layer_needs() -> None:
    @program(axis="tp")
    def layer(
        x: R["t", "d"], w: S(1)["d", "h"], o: S(0)["h", "d"], s: R["d"], b: R["d"], seed: int
    ):
        h = gelu(layer_norm(x, s, b) @ w)
        y = all_reduce(softmax(h, 0) @ o)
        y = where(y > 0, y, 0.1 * y)
        return dropout(y, 0.5, seed) + x, norm(h), amax(y), transpose(mean(y, 0, keep=True))

    made = layer.on(mesh(tp=2), t=3, d=4, h=6)
    assert [made[o].type.shape for o in made.outputs] == [(3, 4), (), (), (4, 1)]
    assert all(not made[o].type.layouts for o in made.outputs)


def test_loads_stores_and_calls_are_known_by_name() -> None:
    @program(axis="dp")
    def step(w: R["n"]):
        x = load("images", S(0)["batch", "n"])
        (y,) = call("model", x, w, outs=[Type(shape=(6, 2), layouts=(("dp", S(0)),))])
        store(y, "out")
        return all_reduce(sum(y))

    made = step.on(mesh(dp=2), n=4, batch=6)
    out = interpret(
        made,
        {"w": np.arange(4.0)},
        iterations=2,
        sources={"images": lambda i: np.full((6, 4), float(i + 1))},
        calls={"model": lambda x, w: np.stack([x @ w, x.sum(1)], 1)},
    )
    assert out.outputs[0][0] == 6 * (12 + 8)
    assert len(out.stored["out"]) == 2


def test_a_pipeline_sends_to_the_next_rank() -> None:
    @program(axis="pp")
    def stage(x: L["n"], first: L["n"]):
        got = send(x)
        return recv(got, first)

    made = stage.on(mesh(pp=3), n=2)
    given = {name: [np.full(2, k + r) for r in range(3)] for name, k in (("x", 10), ("first", 0))}
    out = interpret(made, given).outputs[0]
    assert [o[0] for o in out] == [0, 10, 11]


# -- what is refused, and where ----------------------------------------------------------------


def _line(error: pytest.ExceptionInfo[ProgramError]) -> str:
    return str(error.value).split("`")[1]


def test_an_error_names_the_users_line() -> None:
    @program
    def wrong(g: P["n"]):
        y = g * 2
        return y.sqrt()

    with pytest.raises(ProgramError, match="sqrt of a value that is still to be reduced") as error:
        wrong.on(mesh(dp=2), n=4)
    assert _line(error) == "return y.sqrt()"
    assert str(error.value).startswith("test_language.py:")


def test_a_condition_on_a_value_is_refused() -> None:
    @program
    def wrong(x: R["n"]):
        return x if x > 0 else -x

    with pytest.raises(ProgramError, match=r"ps\.where\(condition, a, b\) for `if`") as error:
        wrong.on(mesh(dp=2), n=4)
    assert _line(error) == "return x if x > 0 else -x"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x, g: x + np.ones(3), "ndarray is not a value of a program"),
        (lambda x, g: cast(x, "f8"), "no element type 'f8'"),
        (lambda x, g: dropout(x, 1.5, 0), "share of 1.5"),
        (lambda x, g: update(x * 2, x), "only parameters are kept"),
        (lambda x, g: update(x, cast(x, "bf16")), "shape and element type must be the same"),
        (lambda x, g: update(x, g), "reduce it first"),
        (lambda x, g: send(x, to=0), "it goes to 'next'"),
        (lambda x, g: recv(x, x, from_="above"), "'prev' or 'next'"),
        (lambda x, g: all_reduce(g, axis="tp"), "there is no axis 'tp'"),
        (lambda x, g: call("f", x, outs=[]), "no results"),
        (lambda x, g: 3, "it may return values only"),
        (lambda x, g: reduce_scatter(g, dim=2), "along dimension 2"),
        (lambda x, g: all_gather(x), "only slices can be gathered"),
        (lambda x, g: store(g, "p"), "still to be reduced"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(body, words: str) -> None:
    def wrong(x, g):
        return body(x, g)

    wrong.__annotations__ = {"x": R["n"], "g": P["n"]}
    with pytest.raises(ProgramError, match=words):
        program(wrong).on(mesh(dp=2), n=4)


def test_a_length_that_nobody_said_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"dimension 'n' without a length"):
        adam.on(mesh(dp=2))


def test_lengths_are_of_dimensions_that_there_are() -> None:
    with pytest.raises(ProgramError, match=r"adam has no dimension 'k'; it has n$"):
        adam.on(mesh(dp=2), n=4, k=3)
    for length in (-1, 2.5, "4"):
        with pytest.raises(ProgramError, match=r"adam.on\(n=.*: a length is a whole number"):
            adam.on(mesh(dp=2), n=length)
    assert adam.on(mesh(dp=2), n=np.int64(4)).digest == adam.on(mesh(dp=2), n=4).digest
    with pytest.raises(ProgramError, match="adam is put on a mesh, not on 2"):
        adam.on(2, n=4)

    @program
    def loads():
        return load("images", S(0)["batch", 3])

    with pytest.raises(ProgramError, match="loads has no dimension 'n'; it has batch"):
        loads.on(mesh(dp=2), batch=4, n=3)


def test_a_slice_along_no_dimension_is_refused() -> None:
    @program
    def wrong(x: S(1)["n"]):
        return x

    with pytest.raises(ProgramError, match="sliced along dimension 1, and has 1"):
        wrong.on(mesh(dp=2), n=4)


def test_an_axis_has_to_be_said_where_there_are_two() -> None:
    @program
    def wrong(x: S(0)["n"]):
        return all_gather(x)

    with pytest.raises(ProgramError, match="which axis of dp=2 × tp=2"):
        wrong.on(mesh(dp=2, tp=2), n=4)


def test_a_load_outside_of_a_program_is_refused() -> None:
    with pytest.raises(ProgramError, match="belongs into a @program"):
        load("images", R[3])


def test_integers_are_annotated_as_such() -> None:
    @program
    def picked(x: R["n", i64], k: int):
        return x + k

    assert picked.on(mesh(dp=1), n=3)["k"].type.dtype == "i64"
