"""Fusing: nodes as one kernel, or a reason why not."""

import pytest
from tests.step.program.same_values import WORLDS, adam_on, assert_same, mlp, sliced_adam

from penstock.errors import ProgramError
from penstock.step.program import L, P, R, mesh, program
from penstock.step.program.contract import contracted
from penstock.step.program.language import (
    all_reduce,
    amax,
    cast,
    gelu,
    recv,
    reduce_scatter,
    relu,
    send,
    softmax,
    sum,
    update,
)
from penstock.step.program.lower import lower

# -- fuse -------------------------------------------------------------------------------------


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


# -- what regions share -----------------------------------------------------------------------


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


def test_a_kernel_does_not_write_over_what_it_still_reads() -> None:
    @program
    def spread(v: R["n"]):
        return update(v, softmax(v, 0) * 2.0)

    made = spread.on(mesh(dp=1), n=3)
    with pytest.raises(ProgramError, match="reads all of v, with an update of it"):
        made.fuse("softmax.1", "update.1")
    assert_same(made, made.fuse("softmax.1", "mul.1"))
