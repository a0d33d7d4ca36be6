"""Chunks and overlap: the same values piece by piece, or a reason why not."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.step.program.same_values import WORLDS, assert_same, mlp, sliced_adam

from penstock.errors import ProgramError
from penstock.step.program import P, R, S, mesh, program
from penstock.step.program.check import check_plan
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    all_to_all,
    amax,
    flatten,
    load,
    relu,
    slice,
    softmax,
    sum,
    transpose,
    unflatten,
    update,
)
from penstock.step.program.lower import lower

# -- chunk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_chunks_of_a_sliced_step_are_runs_of_every_ranks_part(ranks: int, k: int) -> None:
    before = sliced_adam(ranks, n=13)
    after = before.fuse("g.scatter", "w.gather").chunk(k)
    region = after.region("chunk")
    assert region.axis == "dp"
    # A run of four in thirds is two pairs, as torch.chunk cuts it.
    length = -(-13 // ranks)
    assert region.num_chunks == -(-length // -(-length // k))
    assert_same(before, after)


@given(
    ranks=st.integers(1, 4),
    rows=st.integers(1, 9),
    width=st.integers(1, 7),
    k=st.integers(1, 9),
    dim=st.sampled_from([None, 0, 1]),
)
@settings(max_examples=60, deadline=None)
def test_a_product_its_sum_and_what_follows_are_cut_alike(
    ranks: int, rows: int, width: int, k: int, dim: int | None
) -> None:
    before = mlp.on(mesh(tp=ranks), t=rows, d=width, h=5)
    # Rows go through everything; columns do not, since x is read by the first product too.
    last = "add.2"
    length = (rows, width)[dim or 0]
    if k > length:
        with pytest.raises(ProgramError, match=f"{length} pieces at most"):
            before.chunk(k, "matmul.2", last, dim=dim)
        return
    after = before.chunk(k, "matmul.2", last, dim=dim)
    assert after.region("chunk").num_chunks <= k
    assert_same(before, after, bits=False, iterations=1)


def test_chunks_are_as_many_as_there_are_runs() -> None:
    made = mlp.on(mesh(tp=2), t=10, d=6, h=4)
    # Ten rows in sevenths are five pairs, as torch.chunk cuts them.
    assert made.chunk(7, "matmul.2", "add.2").region("chunk").num_chunks == 5


def test_cuts_are_followed_through_transposes_batches_and_rows() -> None:
    @program
    def attention(x: R["b", "t", "d"], w: R["d", "d"]):
        q = x @ w
        scores = softmax(q @ transpose(x), -1)
        out = transpose(scores, 1, 0, 2)
        return amax(out, 2)

    made = attention.on(mesh(dp=2), b=4, t=5, d=3)
    last = made.outputs[0]
    after = made.chunk(3, "q", last, dim=1)
    # The batch is the second dimension once it is transposed.
    assert after.region("chunk").dim(last) == 1
    assert after.region("chunk").dim("q") == 0
    assert after.region("chunk").dim("w") is None
    assert_same(made, after, bits=False, iterations=1)
    # Tokens: every one of them meets all others, which are x too.
    rows = made.chunk(3, "q", last)
    assert rows.region("chunk").dim("scores") == 1
    assert_same(made, rows, bits=False, iterations=1)
    everything = ("transpose.1", "q", "matmul.1", "scores", "out", last)
    with pytest.raises(ProgramError, match="needed whole and in chunks"):
        made.chunk(3, *everything, dim=0)
    assert_same(made, made.chunk(3, *everything), bits=False, iterations=1)


@pytest.mark.parametrize("ranks", WORLDS)
def test_values_that_are_sliced_all_along_are_cut_within_each_part(ranks: int) -> None:
    @program
    def rows(x: S(0)["n", "d"], w: R["d", "d"]):
        return all_gather(relu(x @ w) + x)

    before = rows.on(mesh(dp=ranks), n=10, d=4)
    after = before.chunk(2, "matmul.1", "add.1")
    assert after.region("chunk").axis is None
    assert_same(before, after, bits=False)
    with_gather = before.chunk(2, "matmul.1", "all_gather.1")
    assert with_gather.region("chunk").axis == "dp"
    assert_same(before, with_gather, bits=False)
    # Columns: the product mixes those of x, which is added to it too.
    with pytest.raises(ProgramError, match="cannot be cut"):
        before.chunk(2, "matmul.1", "all_gather.1", dim=1)


def test_merged_dimensions_are_cut_evenly_or_not_at_all() -> None:
    @program
    def heads(x: R["t", "d"]):
        y = relu(unflatten(x, 0, (x.shape[0] // 2, 2)))
        return flatten(y, 0) + x

    made = heads.on(mesh(dp=1), t=12, d=3)
    assert_same(made, made.chunk(3, "unflatten.1", "add.1", dim=0))
    with pytest.raises(ProgramError, match="do not divide"):
        made.chunk(4, "unflatten.1", "add.1", dim=0)
    assert_same(made, made.chunk(2, "unflatten.1", "add.1", dim=1))


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [
        (("sum.1", "mul.1"), {}, "mixes dimension"),
        (("sum.1",), {}, "are numbers"),
        (("s",), {"dim": 1}, "mixes dimension 1"),
        (("y",), {"dim": 2}, "there is no dimension 2"),
        (("x",), {}, "load comes whole"),
    ],
)
def test_what_mixes_the_dimension_is_refused(names: Any, options: Any, reason: str) -> None:
    @program
    def mixing(a: R["n", "n"]):
        x = load("x", R["n", "n"])
        s = softmax(x, 1)
        y = s @ a
        return y * sum(y)

    made = mixing.on(mesh(dp=1), n=4)
    with pytest.raises(ProgramError, match=reason):
        made.chunk(2, *names, **options)


def test_pieces_that_make_no_sense_are_refused() -> None:
    made = sliced_adam(2, n=10)
    for k in (0, -1, 2.0, True):
        with pytest.raises(ProgramError, match=r"1 or more|is no int"):
            made.chunk(k, "g.scatter", "w.gather")
    with pytest.raises(ProgramError, match="5 pieces at most"):
        made.chunk(6, "g.scatter", "w.gather")
    with pytest.raises(ProgramError, match="name nodes or a region"):
        made.chunk(2)
    cut = made.chunk(2, "g.scatter", "w.gather")
    with pytest.raises(ProgramError, match="already"):
        cut.chunk(2, "g.scatter", "w.gather")
    with pytest.raises(ProgramError, match="of that name already"):
        cut.chunk(2, "g.scatter", "w.gather", name="w")


@pytest.mark.parametrize("ranks", WORLDS)
def test_slices_that_change_their_dimension_are_cut_along_either(ranks: int) -> None:
    @program
    def turned(x: S(0)["n", "n"]):
        return all_gather(all_to_all(x, 1) * 2.0)

    made = turned.on(mesh(dp=ranks), n=6)
    for dim in (0, 1):
        k = 2 if ranks < 4 else 1
        assert_same(made, made.chunk(k, "all_to_all.1", "all_gather.1", dim=dim))


def test_fused_nodes_are_cut_together_or_not_at_all() -> None:
    made = mlp.on(mesh(tp=2), t=6, d=4, h=4)
    fused = made.fuse("add.1", "add.2")
    cut = fused.chunk(2, "matmul.2", "add.1")
    assert {"add.2", "dropout.1"} <= set(cut.region("chunk").nodes)
    with pytest.raises(ProgramError, match="is not cut itself"):
        made.chunk(2, "matmul.2", "add.1").fuse("add.1", "add.2")


def test_what_every_chunk_makes_for_itself_stays_inside() -> None:
    @program
    def scaled(x: R["t", "d"], b: R["d"]):
        twice = b * 2.0
        return x + twice, twice

    made = scaled.on(mesh(dp=1), t=4, d=3).apply("fuse", "twice", "add.1", "add.1")
    with pytest.raises(ProgramError, match="every chunk would write it"):
        made.chunk(2, "fuse", dim=0)
    assert_same(made, made.chunk(3, "fuse", dim=1))


# -- overlap ----------------------------------------------------------------------------------


def test_chunks_overlap_and_whole_values_that_wait_do_not() -> None:
    made = mlp.on(mesh(tp=2), t=8, d=6, h=8)
    with pytest.raises(ProgramError, match="chunk them together"):
        made.overlap("matmul.2", "y")
    cut = made.chunk(4, "matmul.2", "add.2")
    after = cut.overlap("matmul.2", "y")
    assert_same(made, after, bits=False)
    waits = {task.name: task.after for task in lower(cut.overlap()).tasks}
    # The second product does not wait for the first sum.
    assert "y[0]" not in waits["matmul.2[1]"]
    in_turn = lower(cut).tasks
    assert all(one.name in other.after for one, other in pairwise(in_turn))
    with pytest.raises(ProgramError, match="overlaps in region"):
        after.overlap("y", "matmul.2")
    with pytest.raises(ProgramError, match="overlap of nothing"):
        made.overlap()


def test_one_lane_alone_has_nothing_to_overlap_with() -> None:
    made = mlp.on(mesh(tp=2), t=8, d=6, h=8)
    with pytest.raises(ProgramError, match="keeps compute busy"):
        made.chunk(2, "add.1", "add.2").overlap()


def test_what_needs_nothing_of_each_other_overlaps_as_it_is() -> None:
    @program
    def two(a: P["n"], b: R["n"]):
        return all_reduce(a), relu(b)

    made = two.on(mesh(dp=2), n=4)
    after = made.overlap("all_reduce.1", "relu.1")
    assert all(not task.after for task in lower(after).tasks)
    assert_same(made, after)


# -- values that a state had before --------------------------------------------------------------


@program
def old_and_new(v: R["n", "n"], x: R["n", "n"]):
    new = update(v, relu(x))
    old = v * 2.0
    return old @ new


def test_a_region_that_needs_a_state_as_it_was_and_as_it_is_is_refused() -> None:
    made = old_and_new.on(mesh(dp=1), n=4)
    check_plan(lower(made))
    with pytest.raises(ProgramError, match="region chunk reads the old value of v and depends"):
        made.chunk(2, "old", "matmul.1")
    check_plan(lower(made.chunk(2, "matmul.1")))


def test_a_bucket_of_a_state_as_it_was_and_as_it_is_is_refused() -> None:
    @program
    def both(v: P["n"]):
        new = update(v, v * 0.5)
        return all_reduce(v), all_reduce(new)

    made = both.on(mesh(dp=2), n=4)
    check_plan(lower(made))
    one, other = (node.name for node in made.nodes if node.op == "all_reduce")
    with pytest.raises(ProgramError, match="region bucket reads the old value of v"):
        made.bucket(one, other)


def test_a_slice_of_a_state_as_it_was_cannot_become_the_state() -> None:
    @program
    def returned(v: R["n"]):
        new = update(v, relu(v))
        return slice(v, 0), new

    made = returned.on(mesh(dp=2), n=4)
    check_plan(lower(made))
    with pytest.raises(ProgramError, match="would return the old value of v"):
        made.keep_sliced("v")


def test_chunks_wait_for_all_of_what_another_region_has_cut_otherwise() -> None:
    @program
    def crossed(x: P["n", "n"]):
        y = x * 2.0
        z = all_reduce(y)
        return relu(z) * 3.0

    made = crossed.on(mesh(dp=2), n=4).chunk(2, "y", "z", dim=0).chunk(4, "relu.1", "mul.1", dim=1)
    plan = lower(made.overlap("y", "z", "relu.1", "mul.1"))
    check_plan(plan)
    assert set(plan.by_name["relu.1[3]"].after) >= {"z[0]", "z[1]"}
