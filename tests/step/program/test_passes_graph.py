"""Rewrites of the graph: what each makes, and what it refuses and why."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ProgramError
from penstock.step.program import L, P, Program, R, S, Type, bf16, interpret, mesh, program, u8
from penstock.step.program.interpret import gathered
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    amax,
    call,
    cast,
    dropout,
    gelu,
    load,
    norm,
    recv,
    send,
    slice,
    softmax,
    store,
    sum,
    update,
)
from penstock.step.program.schedule import apply

RNG = np.random.default_rng(7)


@program
def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr=1e-2, b1=0.9, b2=0.999, eps=1e-8):
    g = all_reduce(g, "mean")
    m = update(m, b1 * m + (1 - b1) * g)
    v = update(v, b2 * v + (1 - b2) * g * g)
    return update(w, w - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps))


@program
def lamb(g: P["n"], w: R["n"], m: R["n"], lr=1e-2):
    g = all_reduce(g, "mean")
    m = update(m, 0.9 * m + 0.1 * g)
    return update(w, w - lr * norm(w) / norm(m) * m)


@program(axis="tp")
def mlp(x: R["t", "d"], w1: S(1)["d", "h"], w2: S(0)["h", "d"], b: R["d"], seed: int):
    h = gelu(x @ w1)
    y = all_reduce(h @ w2)
    return dropout(y + b, 0.1, seed) + x


def _given(made: Program) -> dict:
    out = {}
    for node in made.inputs:
        if node.op == "scalar":
            out[node.name] = dict(made.defaults).get(node.name, 3)
        elif node.type.axes("P") or node.type.axes("L"):
            shapes = [node.type.local_shape(made.mesh, r) for r in range(made.mesh.num_ranks)]
            out[node.name] = [RNG.normal(size=shape) for shape in shapes]
        else:
            out[node.name] = RNG.normal(size=node.type.shape) ** 2
    return out


def _same(before: Program, after: Program, **more) -> None:
    """Assert that both make the same, gathered."""
    given = _given(before)
    ran = [(p, interpret(p, given, iterations=2, **more)) for p in (before, after)]
    made = [
        [gathered(h, p[n].type, p.mesh) for n, h in zip(p.outputs, o.outputs, strict=True)]
        + [gathered(o.states[s], p[p.states[s]].type, p.mesh) for s in sorted(p.states)]
        for p, o in ran
    ]
    for one, other in zip(*made, strict=True):
        assert np.allclose(one, other, rtol=1e-11, atol=1e-12)


def _ops(made: Program, *ops: str) -> list[str]:
    return [node.name for node in made.nodes if node.op in ops]


MOVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast", "send")


# -- split -------------------------------------------------------------------------------------


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    start = adam.on(mesh(dp=3), n=10)
    made = start.split("g")
    assert _ops(made, *MOVES) == ["g.scatter", "g.gather"]
    assert made["g.scatter"].attr("op") == "mean"
    _same(start, made)


def test_an_all_reduce_is_a_reduce_and_a_broadcast() -> None:
    start = adam.on(mesh(dp=3), n=10)
    made = start.split("g", into="root", root=2)
    assert _ops(made, *MOVES) == ["g.reduce", "g.broadcast"]
    _same(start, made)


def test_the_dimension_that_all_ranks_get_a_part_of_is_sliced() -> None:
    @program
    def wide(g: P[2, 9]):
        return all_reduce(g)

    assert wide.on(mesh(dp=4)).split("all_reduce.1")["all_reduce.1.scatter"].attr("dim") == 1


@program
def stage(x: (P.over("tp") & L.over("pp"))[6, 4], b: R[4]):
    y = all_reduce(x, axis="tp")
    return send(y + b, axis="pp")


def test_each_rank_sends_a_part_of_what_all_have() -> None:
    start = stage.on(mesh(pp=2, tp=2))
    sent = _ops(start, "send")[0]
    made = start.split(sent)
    assert made[sent].type.layout("tp") == S(0)
    # With the gather of the all-reduce below the send, nothing is gathered on this side of it.
    less = start.split("y").sink("y.gather", below=sent)
    assert [less[n].axes for n in _ops(less, *MOVES)] == [("tp",), ("pp",), ("tp",)]
    for program_ in (made, less):
        given = _given(start)
        out = [interpret(p, given).outputs[0] for p in (start, program_)]
        assert all(np.allclose(a, b) for a, b in zip(*out, strict=True))


def test_a_send_of_what_was_gathered_sends_the_slices() -> None:
    @program
    def sent(x: (S(0).over("tp") & L.over("pp"))[6]):
        whole = all_gather(x, axis="tp")
        return send(whole, axis="pp")

    made = sent.on(mesh(pp=2, tp=2)).split("send.1")
    assert _ops(made, "all_gather", "slice") == ["send.1.gather"]


def test_a_gather_that_a_rewrite_leaves_without_readers_goes_with_it() -> None:
    @program
    def passed(x: (P.over("tp") & L.over("pp"))[6, 4], b: R[4]):
        y = all_reduce(x, axis="tp")
        sent = send(y, axis="pp")
        return sent + b

    start = passed.on(mesh(pp=2, tp=2))
    made = start.split("y").split("sent").sink("sent.gather")
    assert [made[n].axes for n in _ops(made, *MOVES)] == [("tp",), ("pp",), ("tp",)]
    given = _given(start)
    out = [interpret(p, given).outputs[0] for p in (start, made)]
    assert all(np.allclose(a, b) for a, b in zip(*out, strict=True))


def test_each_rank_loads_a_part_of_what_all_need() -> None:
    @program
    def loaded(w: S(1).over("tp")[3, 4]):
        x = load("x", S(0).over("dp")[8, 3, u8])
        return cast(x, "f32") @ w

    start = loaded.on(mesh(dp=2, tp=2))
    made = start.split("x", axis="tp", dim=0)
    assert made["x"].type.layouts == (("dp", S(0)), ("tp", S(0)))
    assert made["x.gather"].type.dtype == "u8"
    _same(start, made, sources={"x": lambda i: np.arange(24).reshape(8, 3) + i})


# -- sink and keep_sliced ----------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_adam_on_slices_gathers_its_weights_only(num_ranks: int) -> None:
    start = adam.on(mesh(dp=num_ranks), n=10)
    made = start.split("g").sink("g.gather", below="w").keep_sliced("m", "v")
    assert _ops(made, *MOVES) == ["g.scatter", "w.gather"]
    assert [made[name].type.layout("dp") for name in "mvw"] == [S(0), S(0), R]
    # All the arithmetic on tensors is on slices.
    work = [n for n in made.nodes if n.type.ndim and n.op not in (*MOVES, "input", "update")]
    assert all(n.type.layout("dp") == S(0) for n in work)
    _same(start, made)


def test_weights_kept_sliced_are_gathered_once_for_those_that_need_them_whole() -> None:
    @program
    def step(x: R["t", "n"], w: R["n", "k"], g: P["n", "k"], lr=0.1):
        y = x @ w
        z = x @ gelu(w)
        g = all_reduce(g)
        update(w, w - lr * g)
        return y, z

    start = step.on(mesh(dp=2), t=3, n=5, k=4)
    made = start.split("g").sink("g.gather", below="w").keep_sliced("w")
    assert _ops(made, *MOVES) == ["w.gather", "g.scatter"]
    assert made["w.gather"].inputs == ("w",)
    _same(start, made)


def test_norms_of_slices_are_small_all_reduces() -> None:
    start = lamb.on(mesh(dp=3), n=10)
    made = start.split("g").sink("g.gather", below="w").keep_sliced("m", "w")
    gathers = _ops(made, "all_gather")
    reduces = [made[name].type.num_elements for name in _ops(made, "all_reduce")]
    assert gathers == []
    assert reduces == [1, 1]
    _same(start, made)


def test_a_layer_below_its_gather_is_dropped_out_by_place() -> None:
    start = mlp.on(mesh(tp=3), t=7, d=6, h=5)
    made = start.split("y").sink("y.gather")
    assert made[_ops(made, "dropout")[0]].type.layout("tp") == S(0)
    assert _ops(made, *MOVES)[-1] == made.outputs[0]
    _same(start, made)


def test_two_all_reduces_that_are_added_become_one() -> None:
    @program
    def added(a: P[6], b: P[6], k: R[6]):
        x, y = all_reduce(a), all_reduce(b)
        return (x + y) * k

    start = added.on(mesh(dp=2))
    reduces = _ops(start, "all_reduce")
    made = start.sink(*reduces)
    assert len(_ops(made, "all_reduce")) == 1
    _same(start, made)
    back = made.hoist(_ops(made, "all_reduce")[0], above=_ops(made, "add")[0])
    assert len(_ops(back, "all_reduce")) == 2
    _same(start, back)


def test_a_slice_of_what_is_gathered_is_an_exchange() -> None:
    @program
    def turned(x: S(0)[4, 6], y: S(0)[4, 6]):
        a, b = all_gather(x), all_gather(y)
        return slice(a, 1), slice(b, 0) * 2

    start = turned.on(mesh(dp=2))
    one, other = _ops(start, "all_gather")
    made = start.sink(one).sink(other)
    assert [made[n].op for n in _ops(made, *MOVES)] == ["all_to_all"]
    _same(start, made)


def test_batches_of_a_product_are_sliced_where_the_gather_passes_it() -> None:
    @program
    def batched(x: S(0)[4, 2, 3], w: R[4, 3, 5]):
        return all_gather(x) @ w

    start = batched.on(mesh(dp=2))
    made = start.sink("all_gather.1")
    assert made["w.slice"].op == "slice"
    _same(start, made)


def test_what_is_stored_in_slices_is_not_gathered() -> None:
    @program
    def saved(x: S(0)[5]):
        store(all_gather(x) * 2, "p")

    start = saved.on(mesh(dp=2))
    made = start.sink("all_gather.1")
    assert _ops(made, *MOVES) == []
    stored = interpret(made, {"x": np.arange(5.0)}).stored["p"][0]
    assert np.concatenate(stored).tolist() == [0, 2, 4, 6, 8]


def test_received_values_are_sliced_beside_what_was_sent() -> None:
    @program
    def chained(x: (S(0).over("tp") & L.over("pp"))[4], first: L.over("pp")[4]):
        got = send(all_gather(x, axis="tp"), axis="pp")
        return recv(got, first, axis="pp") * 2

    start = chained.on(mesh(pp=2, tp=2))
    made = start.sink("all_gather.1")
    assert made["first.slice"].op == "slice"
    given = {"x": [np.full(2, r) for r in range(4)], "first": [np.ones(4)] * 2 + [np.zeros(4)] * 2}
    out = [interpret(p, given).outputs[0] for p in (start, made)]
    assert all(np.allclose(a, b) for a, b in zip(*out, strict=True))


# -- hoist, dead, reshard, wire ----------------------------------------------------------------


def test_a_gather_above_a_cast_sends_fewer_bytes() -> None:
    @program
    def grown(x: S(0)[6, u8]):
        return all_gather(cast(x, "f32") / 255.0)

    start = grown.on(mesh(dp=2))
    made = start.hoist("all_gather.1", above="cast.1")
    (gather,) = _ops(made, "all_gather")
    assert made[gather].type.dtype == "u8"
    given = {"x": np.arange(6)}
    out = [interpret(p, given).outputs[0][0] for p in (start, made)]
    assert np.array_equal(*out)


def test_hoisting_undoes_sinking() -> None:
    start = mlp.on(mesh(tp=2), t=4, d=6, h=4).split("y")
    made = start.sink("y.gather")
    back = made.hoist(made.outputs[0], above="add.1")
    assert [str(n.type) for n in back.nodes if n.op == "add"] == ["f32[4×6] R"] * 2
    _same(start, back)


def test_a_slice_goes_above_communication_along_another_axis() -> None:
    @program
    def reduced(g: P.over("dp")[8, 3]):
        return slice(all_reduce(g, axis="dp") * 2, 0, axis="tp")

    start = reduced.on(mesh(dp=2, tp=2))
    made = start.hoist("slice.1", above="all_reduce.1")
    assert made[_ops(made, "all_reduce")[0]].type.layout("tp") == S(0)
    given = {"g": [np.full((8, 3), float(r // 2)) for r in range(4)]}
    out = [interpret(p, given).outputs[0] for p in (start, made)]
    assert all(np.array_equal(a, b) for a, b in zip(*out, strict=True))


def test_what_nobody_reads_goes_and_the_rest_stays() -> None:
    @program
    def idle(x: S(0)[4], y: R[4]):
        unread = all_gather(x * 2)
        unread * 3
        return y + 1

    made = idle.on(mesh(dp=2)).dead()
    assert [n.name for n in made.nodes if n.op not in ("input", "const")] == list(made.outputs)


def test_a_value_is_gathered_again_for_a_later_reader() -> None:
    @program
    def twice(w: S(0)[6]):
        whole = all_gather(w)
        y = whole * 2
        return y, whole * y

    start = twice.on(mesh(dp=2))
    made = start.reshard("whole")
    assert len(_ops(made, "all_gather")) == 2
    assert made[made.outputs[1]].inputs[0] != "whole"
    _same(start, made)


def test_a_program_with_a_narrow_wire_says_that_it_is_approximate() -> None:
    start = adam.on(mesh(dp=2), n=8).split("g")
    made = start.wire("g.scatter")
    assert made.is_approximate
    assert not start.is_approximate
    assert "program adam on dp=2, approximate" in str(made)
    assert made["g.scatter"].attr("wire") == "bf16"
    assert not made.wire("g.scatter", dtype=None).is_approximate
    # What it becomes sends as it does.
    assert adam.on(mesh(dp=2), n=8).wire().split("g")["g.gather"].attr("wire") == "bf16"


# -- hier and factor ---------------------------------------------------------------------------


def test_an_all_reduce_of_two_axes_sends_less_between_nodes() -> None:
    start = adam.on(mesh(dp=4), n=8).factor("dp", ("node", 2), ("local", 2))
    made = start.hier("g")
    assert [(n, made[n].axes) for n in _ops(made, *MOVES)] == [
        ("g.scatter", ("local",)), ("g.reduce", ("node",)), ("g.gather", ("local",)),
    ]  # fmt: skip
    assert made["g.reduce"].type.local_shape(made.mesh, 0) == (4,)
    _same(adam.on(mesh(dp=4), n=8), made)
    sunk = made.sink("g.gather", below="w").keep_sliced("m", "v")
    assert _ops(sunk, "all_gather") == ["w.gather"]
    _same(adam.on(mesh(dp=4), n=8), sunk)


def test_a_gather_of_two_axes_begins_with_the_one_that_cut_last() -> None:
    start = adam.on(mesh(dp=4), n=8).split("g").factor("dp", ("node", 2), ("local", 2))
    made = start.hier("g.gather")
    assert [made[n].axes for n in _ops(made, "all_gather")] == [("local",), ("node",)]
    _same(start, made)


# -- what is refused ---------------------------------------------------------------------------


@program
def many(g: P["n"], h: P["n"], x: S(0)["n"], w: R["n"], l_: L["n"], k: R["n"], s: P):
    g = all_reduce(g)
    h = all_reduce(h)
    whole = all_gather(x)
    soft = softmax(whole, 0)
    total = all_reduce(s)
    mixed = whole + l_
    pair = whole * 2
    (called,) = call("f", pair, outs=[Type(shape=(6,))])
    low = cast(whole, bf16)
    lower = amax(low * k)
    w = update(w, g + h)
    return soft, total, mixed, called, lower, w


def _many(num_ranks: int = 2) -> Program:
    return many.on(mesh(dp=num_ranks), n=6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("split('w')", "no all_reduce or send or load called 'w'"),
        ("split('g', dim=1)", "along dimension 1; it has 1"),
        ("split('g', into='two')", "there are 'scatter', and 'root'"),
        ("split('g', into='root', root=7)", "root 7 of axis 'dp'"),
        ("split('total')", "a scalar: it has no parts"),
        ("sink()", "needs the name"),
        ("sink('w')", "no all_gather or all_reduce called 'w'"),
        ("sink('whole', below='w')", "which does not depend on it"),
        ("sink('whole', below='soft')", "soft stands between and cannot go above it"),
        ("sink('whole', below='mixed')", "a local value has no parts"),
        ("sink('whole', below='call.1')", "call is not defined on slices"),
        ("sink('whole', below='nothing')", "has no value 'nothing'"),
        ("sink('total')", "nothing below it can go above it: nothing reads it"),
        ("sink('g')", "still to be reduced"),
        ("sink('g', 'whole')", "what sinks together is of one kind"),
        ("sink('g', 'h', below='w')", "a state cannot be left partial"),
        ("hoist('g')", "nothing is above input"),
        ("hoist('g', above='w')", "does not depend on"),
        ("hoist('pair')", "no all_gather or all_reduce or slice called 'pair'"),
        ("keep_sliced()", "needs the names of states"),
        ("keep_sliced('k')", "which is no state; states are updated parameters: w"),
        ("keep_sliced('w', dim=1)", "along dimension 1; it has 1"),
        ("keep_sliced('w', axis='tp')", "there is no axis 'tp'"),
        ("keep_sliced('w')\nkeep_sliced('w')", "is held as S\\(0\\) there"),
        ("dead('whole')", "whole is not dead: soft, mixed"),
        ("dead('soft')", "returns it"),
        ("dead('call.1')", "is not dead"),
        ("dead('w.update')", "is not dead"),
        ("wire('g', dtype='f32')", "values are sent as bf16 or f16"),
        ("wire('pair')", "called 'pair'"),
        ("hier('g')", "along one axis, 'dp'; factor makes two axes of it"),
        ("factor('dp', ('a', 2), ('b', 2))", "2 ranks into .* which makes 4"),
        ("factor('dp', ('a', 2))", "two or more names with sizes"),
        ("factor('tp', ('a', 1), ('b', 1))", "there is no axis 'tp'"),
        ("reshard('g')", "no all_gather called 'g'"),
        ("reshard('whole', at='soft')", "can be gathered again for one of"),
        ("fly('g')", "there is no rewrite 'fly'"),
    ],
)
def test_a_rewrite_that_would_change_the_meaning_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        apply(_many(), text)


def test_lengths_that_do_not_divide_are_not_factored() -> None:
    start = adam.on(mesh(dp=4), n=9).split("g")
    with pytest.raises(ProgramError, match="lengths that 4 divides keep their parts"):
        start.factor("dp", ("node", 2), ("local", 2))


def test_an_axis_along_which_something_is_sent_is_not_factored() -> None:
    with pytest.raises(ProgramError, match="is a send, which goes along one axis"):
        stage.on(mesh(pp=4, tp=2)).factor("pp", ("a", 2), ("b", 2))


def test_a_send_is_split_where_ranks_have_the_same() -> None:
    with pytest.raises(ProgramError, match="those that do are of no axis"):
        stage.on(mesh(pp=2, tp=2)).split("y").sink("y.gather").split("send.1")


def test_a_state_that_has_changed_is_not_gathered_again() -> None:
    @program
    def changed(w: S(0)[6]):
        whole = all_gather(w)
        y = whole * 2
        update(w, w * 3)
        return y, whole * y

    with pytest.raises(ProgramError, match="w has been changed by then"):
        changed.on(mesh(dp=2)).reshard("whole")


def test_a_mean_is_not_the_sum_that_a_gather_would_make() -> None:
    @program
    def averaged(x: S(0)[6]):
        y = all_reduce(sum(x), "mean")
        return all_gather(x * y)

    start = averaged.on(mesh(dp=2))
    with pytest.raises(ProgramError, match="all_reduce along the same axis stands between"):
        start.hoist("all_gather.1", above="sum.1")


def test_a_gather_does_not_go_above_an_update() -> None:
    @program
    def kept(w: S(0)[6]):
        return all_gather(update(w, w * 2))

    with pytest.raises(ProgramError, match="an update is done once"):
        kept.on(mesh(dp=2)).hoist("all_gather.1")


def test_the_graph_is_rewritten_before_regions_are_made() -> None:
    made = adam.on(mesh(dp=2), n=8).split("g").sink("g.gather", below="w").fuse("mul.2", "add.1")
    with pytest.raises(ProgramError, match="rewrite the graph first"):
        made.keep_sliced("m")


def test_a_wrong_program_of_a_rewrite_is_found_before_anybody_sees_it(monkeypatch) -> None:
    from penstock.step.program import passes

    def forgets(program: Program) -> Program:
        return program.with_nodes(n for n in program.nodes if n.op != "all_reduce")

    monkeypatch.setitem(passes.PASSES, "forgets", forgets)
    with pytest.raises(ProgramError, match=r"reads g.all_reduce before it is made"):
        adam.on(mesh(dp=2), n=8).apply("forgets")


def test_what_is_returned_keeps_its_layout(monkeypatch) -> None:
    from penstock.step.program import passes

    def stays_sliced(program: Program) -> Program:
        gather = program[program.outputs[0]]
        return program.with_nodes(program.nodes, outputs=gather.inputs)

    monkeypatch.setitem(passes.PASSES, "stays_sliced", stays_sliced)
    start = mlp.on(mesh(tp=2), t=4, d=6, h=4).split("y").sink("y.gather")
    with pytest.raises(ProgramError, match=r"tp:S\(0\), and returned f32\[4×6\] R before"):
        start.apply("stays_sliced")
