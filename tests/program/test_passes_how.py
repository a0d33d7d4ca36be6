"""Rewrites that say how a program is carried out: the same values, or a reason why not."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program import L, P, Program, R, S, f16, interpret, mesh, program
from penstock.program.contract import contracted
from penstock.program.interpret import gathered
from penstock.program.language import (
    all_gather,
    all_reduce,
    all_to_all,
    amax,
    cast,
    dropout,
    flatten,
    gelu,
    load,
    recv,
    reduce_scatter,
    relu,
    send,
    softmax,
    store,
    sum,
    transpose,
    unflatten,
    update,
)
from penstock.program.language import slice as slice_of
from penstock.program.lower import lower

WORLDS = [1, 2, 3, 4]


@program
def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = all_reduce(g, "mean")
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return update(w, w - lr * step)


@program(axis="tp")
def mlp(x: R["t", "d"], w1: S(1)["d", "h"], w2: S(0)["h", "d"], b: R["d"], seed: int):
    h = gelu(x @ w1)
    y = all_reduce(h @ w2)
    return dropout(y + b, 0.25, seed) + x


def adam_on(ranks: int, n: int = 11) -> Program:
    return adam.on(mesh(dp=ranks), n=n)


def sliced_adam(ranks: int, n: int = 11) -> Program:
    return adam_on(ranks, n).split("g").sink("g.gather").keep_sliced("m", "v")


def inputs(made: Program, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {"t": lambda step: step + 1, "lr": 0.01, "seed": 5}
    for node in made.inputs:
        if node.op == "input" and (node.type.axes("P") or node.type.axes("L")):
            out[node.name] = [
                rng.normal(size=node.type.local_shape(made.mesh, rank))
                for rank in range(made.mesh.num_ranks)
            ]
        elif node.op == "input":
            out[node.name] = np.abs(rng.normal(size=node.type.shape))
    return {k: v for k, v in out.items() if k in made}


def sources(made: Program) -> dict[str, Any]:
    shapes = {str(n.attr("source")): n.type.shape for n in made.nodes if n.op == "load"}
    return {
        name: lambda step, shape=shape: np.random.default_rng(step).normal(size=shape)
        for name, shape in shapes.items()
    }


def wholes(made: Program, given: dict[str, Any], iterations: int) -> list[Any]:
    got = interpret(made, given, iterations=iterations, sources=sources(made))
    out = [
        held if made[name].type.axes("L") else gathered(held, made[name].type, made.mesh)
        for name, held in zip(made.outputs, got.outputs, strict=True)
    ]
    out += [gathered(got.states[s], made[s].type, made.mesh) for s in sorted(got.states)]
    for name, held in sorted(got.stored.items()):
        node = next(n for n in made.nodes if n.attr("place") == name)
        out += [gathered(one, node.type, made.mesh) for one in held]
    return out


def assert_same(before: Program, after: Program, *, bits: bool = True, iterations: int = 3) -> None:
    given = inputs(before)
    want, got = wholes(before, given, iterations), wholes(after, given, iterations)
    assert len(want) == len(got)
    for one, other in zip(want, got, strict=True):
        if bits:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


# -- fuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
def test_reduce_scatter_adam_and_gather_are_one_region(ranks: int) -> None:
    before = sliced_adam(ranks)
    after = before.fuse("g.scatter", "w.gather", name="up")
    region = after.region("up")
    # What is computed for nobody else belongs to it, and so does the update of the weights.
    assert {"mul.1", "m.update", "v.update", "update.1"} <= set(region.nodes)
    assert "sub.1" not in region.nodes, "numbers made of numbers come before a step"
    assert dict(region.attrs)["form"] == "collective"
    assert len(lower(after).tasks) == 1
    assert_same(before, after)


def test_only_what_is_computed_between_two_collectives_is_one_kernel() -> None:
    before = sliced_adam(2)
    after = before.fuse("g.scatter", "w.gather", compute=True)
    region = after.region("fuse")
    assert not {"g.scatter", "w.gather", "update.1"} & set(region.nodes)
    assert dict(region.attrs)["form"] == "compute"
    assert_same(before, after)
    with pytest.raises(ProgramError, match="nothing alone"):
        adam_on(2).split("g").fuse("g.scatter", "g.gather", compute=True)


def test_element_by_element_work_is_one_kernel() -> None:
    before = mlp.on(mesh(tp=2), t=4, d=6, h=8)
    after = before.fuse("add.1", "add.2")
    assert dict(after.region("fuse").attrs)["form"] == "compute"
    assert_same(before, after)


def test_rows_may_be_reduced_in_a_kernel_and_columns_may_not() -> None:
    @program
    def norms(x: R["r", "c"]):
        rows = x / amax(x * x, -1, keep=True)
        columns = x / sum(x, 0, keep=True)
        return rows, columns, softmax(x, 0) + 1.0

    made = norms.on(mesh(dp=1), r=4, c=5)
    assert_same(made, made.fuse("mul.1", "rows"))
    with pytest.raises(ProgramError, match="only the last ones can be reduced"):
        made.fuse("sum.1", "columns")
    with pytest.raises(ProgramError, match="over dimensions"):
        made.fuse("softmax.1", "add.1")


def test_a_region_with_something_between_is_refused() -> None:
    @program
    def diamond(a: R["n", "n"]):
        x = relu(a)
        y = x @ a
        return x + y

    made = diamond.on(mesh(dp=1), n=3)
    with pytest.raises(ProgramError, match="y"):
        made.fuse("x", "add.1")
    with pytest.raises(ProgramError, match="y stands between them"):
        made.apply("fuse", "x", "add.1", "x")


def test_two_regions_that_wait_for_each_other_are_refused() -> None:
    """Each alone is fine: nothing stands between its own nodes."""

    @program
    def crossed(a: R["n"], b: R["n"]):
        one = relu(a)
        two = relu(b)
        return one * 2.0, two * 3.0

    made = crossed.on(mesh(dp=1), n=3)
    first = made.apply("fuse", "one", "mul.2", "mul.2")
    with pytest.raises(ProgramError, match="would wait for each other"):
        first.apply("fuse", "two", "mul.1", "mul.1")


def test_what_regions_need_comes_before_them_whatever_the_order_was() -> None:
    @program
    def late(a: R["n"], b: R["n"]):
        x = relu(a)
        y = gelu(b)
        return x + 1.0 + y

    made = late.on(mesh(dp=1), n=5)
    after = made.apply("fuse", "x", "add.1", "add.2").chunk(2, "x", "add.1", "add.2", dim=0)
    order = [node.name for node in after.nodes]
    assert order.index("y") < order.index("x")
    assert_same(made, after)


def test_collectives_that_do_not_belong_into_a_kernel_are_refused_with_a_way_out() -> None:
    made = adam_on(2)
    with pytest.raises(ProgramError, match="split it first"):
        made.fuse("g", "mul.2")
    sliced = made.split("g")
    with pytest.raises(ProgramError, match=r"end with g\.gather"):
        sliced.fuse("g.scatter", "mul.2")
    made = mlp.on(mesh(tp=2), t=4, d=6, h=8)
    with pytest.raises(ProgramError, match="chunk and overlap"):
        made.fuse("h", "matmul.2")
    with pytest.raises(ProgramError, match="alone"):
        made.fuse("h")

    @program
    def first_scaled(g: P["n"]):
        x = reduce_scatter(g * 2.0)
        return x + 1.0

    with pytest.raises(ProgramError, match="begin with x"):
        first_scaled.on(mesh(dp=2), n=4).fuse("mul.1", "add.1")


def test_parts_of_different_shapes_are_no_kernel() -> None:
    @program
    def mixed(g: P["n"], w: R["n"]):
        x = reduce_scatter(g)
        y = w * 2.0
        return x + y

    made = mixed.on(mesh(dp=2), n=6)
    with pytest.raises(ProgramError, match="these do not fit"):
        made.apply("fuse", "x", "y", "add.1")


@pytest.mark.parametrize("ranks", WORLDS)
def test_norms_inside_only_where_the_kernel_may_stop(ranks: int) -> None:
    @program
    def lamb(g: P["n"], w: R["n"], lr):
        g = all_reduce(g, "mean")
        size = sum(g * g).sqrt()
        return update(w, w - lr * g / size)

    before = lamb.on(mesh(dp=ranks), n=7).split("g").sink("g.gather")
    with pytest.raises(ProgramError, match="norms=True"):
        before.fuse("g.scatter", "w.gather")
    after = before.fuse("g.scatter", "w.gather", norms=True)
    assert dict(after.region("fuse").attrs)["norms"] is True
    assert_same(before, after)


def test_work_and_the_send_of_its_result_are_one() -> None:
    @program(axis="pp")
    def stage(x: L["n"], y: L["n"]):
        there = send(relu(x) * 2.0)
        return recv(there, y)

    before = stage.on(mesh(pp=3), n=5)
    after = before.fuse("relu.1", "there")
    assert_same(before, after)
    with pytest.raises(ProgramError, match="end at the send"):
        before.fuse("relu.1", "recv.1")


# -- chunk -------------------------------------------------------------------------------------


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


# -- overlap -----------------------------------------------------------------------------------


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


# -- bucket ------------------------------------------------------------------------------------


@program
def layers(a: P["n"], b: P["m"], c: P["m", f16], w: R["n"]):
    a = all_reduce(a)
    b = all_reduce(b)
    c = all_reduce(c)
    return update(w, w + a), b, c


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_bucket_says_where_each_value_lies(ranks: int) -> None:
    before = layers.on(mesh(dp=ranks), n=7, m=5)
    names = [n.name for n in before.nodes if n.op == "all_reduce"]
    after = before.bucket(*names[:2], name="small")
    attrs = dict(after.region("small").attrs)
    assert attrs["offsets"] == (0, 7)
    assert attrs["total"] == 12
    assert_same(before, after)
    with pytest.raises(ProgramError, match="element type 'f32' and 'f16'"):
        before.bucket(*names)
    with pytest.raises(ProgramError, match="two or more"):
        before.bucket(names[0])
    with pytest.raises(ProgramError, match="is in the bucket region small already"):
        after.bucket(*names[:2])


def test_parts_of_a_bucket_of_scatters_are_counted_as_a_rank_has_them() -> None:
    made = layers.on(mesh(dp=3), n=7, m=5).split("a").split("b")
    attrs = dict(made.bucket("a.scatter", "b.scatter").region("bucket").attrs)
    assert (attrs["offsets"], attrs["total"]) == ((0, 3), 5)
    with pytest.raises(ProgramError, match="operation"):
        made.bucket("a.scatter", "b.gather")
    with pytest.raises(ProgramError, match="none of all_reduce"):
        made.bucket("a.scatter", "add.1")


def test_collectives_of_which_one_needs_the_other_are_no_bucket() -> None:
    @program
    def chained(a: P["n"], b: P["n"]):
        a = all_reduce(a)
        return all_reduce(b * a)

    made = chained.on(mesh(dp=2), n=4)
    with pytest.raises(ProgramError, match="needs it"):
        made.bucket("a", "all_reduce.1")


# -- ring --------------------------------------------------------------------------------------


@program(axis="tp")
def parallel(x: S(0)["t", "d"], w1: S(1)["d", "h"], w2: S(0)["h", "d"]):
    whole = all_gather(x)
    h = relu(whole @ w1)
    return reduce_scatter(h @ w2)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_products_around_a_ring_are_the_products(ranks: int, by: int, rows: int) -> None:
    before = parallel.on(mesh(tp=ranks), t=rows, d=5, h=6)
    after = before.ring("whole", "matmul.1", by=by).ring("matmul.2", "reduce_scatter.1", by=by)
    assert [dict(r.attrs)["form"] for r in after.regions] == ["gather", "scatter"]
    assert_same(before, after, bits=False)


@pytest.mark.parametrize("ranks", WORLDS)
def test_columns_and_batches_go_around_too_on_any_axis(ranks: int) -> None:
    @program(axis="tp")
    def columns(x: R["t", "d"], w: S(1)["d", "h"], y: S(0)["h", "d", "d"], z: R["h", "d", 2]):
        wide = all_gather(w)
        out = all_gather(y)
        return x @ wide, out @ z

    before = columns.on(mesh(dp=2, tp=ranks), t=3, d=4, h=5)
    after = before.ring("wide", "matmul.1").ring("out", "matmul.2", by=-1)
    assert_same(before, after, bits=False)


def test_one_gather_may_feed_several_products() -> None:
    @program(axis="tp")
    def qkv(x: S(0)["t", "d"], q: S(1)["d", "d"], k: S(1)["d", "d"]):
        x = all_gather(x)
        return x @ q, x @ k, x * 2.0

    before = qkv.on(mesh(tp=3), t=7, d=4)
    assert_same(before, before.ring("x", "matmul.1", "matmul.2"), bits=False)


def test_what_a_ring_cannot_do_is_refused() -> None:
    @program(axis="tp")
    def inner(x: S(1)["t", "d"], w: R["d", "d"], y: P["d", "d"]):
        whole = all_gather(x)
        product = whole @ w
        square = y @ w
        return product, reduce_scatter(square), square

    made = inner.on(mesh(tp=2), t=4, d=4)
    with pytest.raises(ProgramError, match="sums over it"):
        made.ring("whole", "product")
    with pytest.raises(ProgramError, match="the caller reads square too"):
        made.ring("square", "reduce_scatter.1")
    with pytest.raises(ProgramError, match="does not read it"):
        made.ring("product", "reduce_scatter.1")
    with pytest.raises(ProgramError, match="ring of"):
        made.ring("whole", "reduce_scatter.1")
    with pytest.raises(ProgramError, match="by 2"):
        made.ring("whole", "product", by=2)


# -- rotate ------------------------------------------------------------------------------------


@program
def train(w: R["n"], m: R["n"], lr):
    x = load("data", S(0)["b", "n"])
    y = sum(x * w, 1, keep=True)
    g = all_reduce(sum(y * x, 0), "mean")
    m = update(m, 0.9 * m + g)
    w = update(w, w - lr * m)
    saved = store(m, "momentum")
    return w, saved


def sliced_train(ranks: int, n: int = 7) -> Program:
    made = train.on(mesh(dp=ranks), b=6, n=n)
    return made.split("g").sink("g.gather").keep_sliced("m")


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_gather_of_the_weights_goes_into_the_next_iteration(ranks: int) -> None:
    before = sliced_train(ranks)
    after = before.rotate("w.gather")
    assert str(after["w"].type.layout("dp")) == "S(0)"
    assert after["w.gather"].attr("ahead") == 1
    assert after["w.gather"].inputs == ("w",)
    # It stands before its first reader, and the update reads the slice that is kept.
    names = [node.name for node in after.nodes]
    assert names.index("w.gather") == names.index("mul.1") - 1
    for iterations in (1, 3, 4):
        assert_same(before, after, iterations=iterations)


@pytest.mark.parametrize("ranks", WORLDS)
def test_regions_keep_what_stays_when_a_gather_is_rotated(ranks: int) -> None:
    before = sliced_train(ranks)
    scheduled = before.fuse("g.scatter", "w.gather", name="up").chunk(2, "up").overlap()
    after = scheduled.rotate("w")
    assert "w.gather" not in after.region("up").nodes
    assert "g.scatter" in after.region("chunk").nodes
    assert_same(before, after)


@pytest.mark.parametrize("k", [1, 3])
def test_a_load_is_begun_iterations_ahead_and_so_is_what_is_made_of_it(k: int) -> None:
    @program
    def batches(w: R["n"]):
        x = load("x", S(0)["b", "n"])
        whole = all_gather(relu(x))
        return update(w, w + sum(whole, 0))

    before = batches.on(mesh(dp=2), b=5, n=3)
    with pytest.raises(ProgramError, match="as far ahead"):
        before.rotate("relu.1", k)
    after = before.rotate("x", k).rotate("relu.1", k).rotate("whole", k)
    assert after["whole"].attr("ahead") == k
    assert_same(before, after)
    with pytest.raises(ProgramError, match="can be moved over the end"):
        after.rotate("sum.1", k + 1)
    with pytest.raises(ProgramError, match="1 or more"):
        before.rotate("x", 0)


def test_a_store_goes_on_while_the_next_iteration_runs() -> None:
    before = sliced_train(2)
    after = before.rotate("saved")
    assert after["saved"].attr("ahead") == -1
    # Who reads what was stored need not wait for it.
    assert "saved" not in after.outputs
    assert_same(before, after)
    with pytest.raises(ProgramError, match="by 2 iterations"):
        before.rotate("saved", 2)

    @program
    def read_on(x: R["t", "d"]):
        kept = store(x * 2.0, "kept")
        return sum(kept, 1), kept

    before = read_on.on(mesh(dp=1), t=6, d=2)
    cut = before.chunk(3, "sum.1")
    assert cut.rotate("kept").region("chunk").dim("mul.1") == 0
    assert_same(before, cut.rotate("kept"))

    @program
    def found(m: R["n"]):
        return store(m, "before"), update(m, m + 1.0)

    with pytest.raises(ProgramError, match="as the iteration found it"):
        found.on(mesh(dp=1), n=3).rotate("store.1")


def test_a_state_that_is_read_in_the_same_iteration_is_not_rotated() -> None:
    @program
    def twice(g: P["n"], w: R["n"]):
        new = all_gather(reduce_scatter(g) + slice_of(w))
        w = update(w, new)
        return w + 1.0

    made = twice.on(mesh(dp=2), n=4)
    with pytest.raises(ProgramError, match="reads the new w in the same iteration"):
        made.rotate("new")

    @program
    def unread(g: P["n"], w: R["n"]):
        new = all_gather(reduce_scatter(g) + slice_of(w))
        return update(w, new), all_gather(reduce_scatter(g))

    made = unread.on(mesh(dp=2), n=4)
    with pytest.raises(ProgramError, match="keep it sliced"):
        made.rotate("new")
    with pytest.raises(ProgramError, match="0 states take it"):
        made.rotate("all_gather.1")
    with pytest.raises(ProgramError, match="1 is all there is"):
        sliced_train(2).rotate("w", 2)


# -- priority ----------------------------------------------------------------------------------


def test_moves_are_numbered_by_their_first_use_in_the_next_iteration() -> None:
    @program
    def deep(x: S(0)["b", "n"], w1: R["n"], w2: R["n"], lr):
        h = relu(x * w1)
        y = h * w2
        g2 = all_reduce(sum(y * h, 0))
        g1 = all_reduce(sum(y * x, 0))
        loss = all_reduce(sum(y))
        return loss, update(w2, w2 - lr * g2), update(w1, w1 - lr * g1)

    before = deep.on(mesh(dp=2), b=4, n=3)
    after = before.apply("priority_by_use", "net:dp")
    numbers = {name: after[name].attr("priority") for name in ("loss", "g1", "g2")}
    # The loss is wanted now; the first layer's weights are read first next time.
    assert numbers == {"loss": 0, "g1": 1, "g2": 2}
    assert_same(before, after)
    assert before.priority("g2", -3)["g2"].attr("priority") == -3
    assert before.priority("net:dp", 4)["loss"].attr("priority") == 4
    with pytest.raises(ProgramError, match="nothing on lane 'net:tp'; it has net:dp"):
        before.priority("net:tp", 1)
    with pytest.raises(ProgramError, match="which is computed"):
        before.priority("h", 1)
    with pytest.raises(ProgramError, match=r"whole number|is no int"):
        before.priority("g1", 0.5)


# -- what regions share ------------------------------------------------------------------------


def test_contracted_groups_cover_every_node_once_in_an_order() -> None:
    made = sliced_adam(2).fuse("g.scatter", "w.gather")
    groups = contracted(made)
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(node.name for node in made.nodes)
    seen: set[str] = set()
    for group in groups:
        seen |= set(group)
        assert all(i in seen for name in group for i in made[name].inputs)


def test_readers_of_an_old_state_come_before_its_update() -> None:
    @program
    def late_reader(m: R["n"], x: R["n"]):
        new = update(m, m + x)
        return new, m * 2.0, cast(x, "bf16")

    made = late_reader.on(mesh(dp=1), n=3)
    names = [name for group in contracted(made) for name in group]
    assert names.index("mul.1") < names.index("new")
