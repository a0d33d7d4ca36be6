"""The meaning of programs, against NumPy and against optimizers written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ProgramError
from penstock.step.program import L, P, R, S, Type, interpret, mesh, program
from penstock.step.program.interpret import gathered, scattered
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    all_to_all,
    amax,
    broadcast,
    dropout,
    gelu,
    norm,
    reduce,
    reduce_scatter,
    sum,
    update,
)

RNG = np.random.default_rng(7)


@program
def lamb(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr=1e-2, b1=0.9, b2=0.999, eps=1e-6):
    g = all_reduce(g, "mean")
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + 0.01 * w
    return update(w, w - lr * norm(w) / norm(step) * step)


def _lamb(grads, w, steps):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, steps + 1):
        g = np.mean(grads, 0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.01 * w
        w = w - 1e-2 * np.linalg.norm(w) / np.linalg.norm(step) * step
    return w


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_lamb_is_what_it_is_by_hand(num_ranks: int) -> None:
    grads, w = RNG.normal(size=(num_ranks, 10)), RNG.normal(size=10)
    given = {"g": list(grads), "w": w, "m": np.zeros(10), "v": np.zeros(10), "t": lambda i: i + 1}
    out = interpret(lamb.on(mesh(dp=num_ranks), n=10), given, iterations=4)
    for held in out.states["w"]:
        assert np.allclose(held, _lamb(grads, w, 4), rtol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_slices_of_a_product_add_up(num_ranks: int) -> None:
    @program(axis="tp")
    def mlp(x: R[4, 6], w1: S(1)[6, 7], w2: S(0)[7, 5]):
        return all_reduce(gelu(x @ w1) @ w2)

    given = {"x": RNG.normal(size=(4, 6)), "w1": RNG.normal(size=(6, 7))}
    given["w2"] = RNG.normal(size=(7, 5))
    many = interpret(mlp.on(mesh(tp=num_ranks)), given).outputs[0]
    alone = interpret(mlp.on(mesh(tp=1)), given).outputs[0][0]
    assert all(np.allclose(one, alone) for one in many)


def test_a_mask_does_not_depend_on_who_draws_it() -> None:
    @program
    def dropped(x: S(0)[7, 3], y: R[7, 3], seed: int):
        return all_gather(dropout(x, 0.5, seed)), dropout(y, 0.5, seed)

    ones = np.ones((7, 3))
    out = interpret(dropped.on(mesh(dp=4)), {"x": ones, "y": ones, "seed": 5}).outputs
    assert np.array_equal(out[0][0], out[1][0])
    assert set(np.unique(out[0][0])) == {0.0, 2.0}


def test_the_largest_of_an_empty_part_is_less_than_any() -> None:
    @program
    def largest(x: S(0)[3]):
        return all_reduce(amax(x), "max")

    out = interpret(largest.on(mesh(dp=8)), {"x": np.array([-5.0, -2.0, -9.0])})
    assert {float(one) for one in out.outputs[0]} == {-2.0}


def test_each_communication_does_what_its_name_says() -> None:
    @program
    def moves(g: P[6, 4], x: S(0)[6, 4], y: L[2]):
        part = reduce_scatter(g, dim=1)
        return (
            all_gather(part), all_to_all(x, 1), broadcast(reduce(g, root=1), root=1),
            broadcast(y, root=2), all_reduce(sum(x)),
        )  # fmt: skip

    made = moves.on(mesh(dp=3))
    addends, x = RNG.normal(size=(3, 6, 4)), RNG.normal(size=(6, 4))
    given = {"g": list(addends), "x": x, "y": [np.full(2, float(r)) for r in range(3)]}
    whole, turned, back, root, total = interpret(made, given).outputs
    assert all(np.allclose(one, addends.sum(0)) for one in whole)
    assert np.array_equal(turned[1], x[:, 2:4])
    assert turned[2].shape == (6, 0)
    assert np.allclose(back[0], addends.sum(0))
    assert root[0].tolist() == [2.0, 2.0]
    assert np.allclose(total[1], x.sum())


def test_states_carry_over_and_numbers_follow_the_iteration() -> None:
    @program
    def counted(w: S(0)[5], k):
        return update(w, w + k)

    out = interpret(counted.on(mesh(dp=2)), {"w": np.zeros(5), "k": lambda i: i}, iterations=4)
    assert [one.tolist() for one in out.states["w"]] == [[6.0] * 3, [6.0] * 2]


@pytest.mark.parametrize("layouts", [{}, {"dp": S(0)}, {"dp": S(1), "tp": S(1)}, {"tp": S(0)}])
def test_what_is_scattered_is_gathered_again(layouts) -> None:
    made = Type(shape=(5, 7), layouts=tuple(layouts.items()))
    whole, on = RNG.normal(size=(5, 7)), mesh(dp=2, tp=3)
    assert np.array_equal(gathered(scattered(whole, made, on), made, on), whole)


def test_inputs_that_do_not_fit_are_refused() -> None:
    made = lamb.on(mesh(dp=2), n=4)
    given = {"g": [np.ones(4)] * 2, "w": np.ones(4), "m": np.ones(4), "v": np.ones(4), "t": 1}
    for change, words in [
        ({"g": np.ones(4)}, "has no whole"),
        ({"g": [np.ones(4)]}, "given for 1 ranks of 2"),
        ({"g": [np.ones(3)] * 2}, r"has shape \(3,\)"),
        ({"w": np.ones(5)}, r"shape \(5,\) where the program has \(4,\)"),
    ]:
        with pytest.raises(ProgramError, match=words):
            interpret(made, given | change)
    for missing, words in [("w", "needs w"), ("t", "needs a number for t")]:
        with pytest.raises(ProgramError, match=words):
            interpret(made, {k: v for k, v in given.items() if k != missing})
