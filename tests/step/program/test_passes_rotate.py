"""Rotating: a load, a gather or a store over the end of the iteration, or a reason why not."""

import pytest
from tests.step.program.same_values import WORLDS, assert_same

from penstock.errors import ProgramError
from penstock.step.program import P, Program, R, S, mesh, program
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    load,
    reduce_scatter,
    relu,
    store,
    sum,
    update,
)
from penstock.step.program.language import slice as slice_of


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
