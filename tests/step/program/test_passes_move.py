"""How collectives go: in buckets, around rings, by priority; or a reason why not."""

import pytest
from tests.step.program.same_values import WORLDS, assert_same

from penstock.errors import ProgramError
from penstock.step.program import P, R, S, f16, mesh, program
from penstock.step.program.language import all_gather, all_reduce, reduce_scatter, relu, sum, update

# -- bucket -----------------------------------------------------------------------------------


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


# -- ring -------------------------------------------------------------------------------------


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


# -- priority ---------------------------------------------------------------------------------


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
