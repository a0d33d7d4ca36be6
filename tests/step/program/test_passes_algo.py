"""Which way a collective goes round is said beside the program, where the way keeps its values."""

import pytest

from penstock.errors import ProgramError
from penstock.step.program import P, R, S, bf16, language, mesh, program
from penstock.step.program.schedule import apply
from penstock.step.program.verify import verified


@program
def both(a: P[8], b: P[8], c: S(0)[8], h: P[8, bf16]):
    return (
        language.all_reduce(a),
        language.all_reduce(b),
        language.all_gather(c),
        language.all_reduce(h),
    )


MADE = both.on(mesh(dp=4))
A, B, C, H = MADE.outputs


def test_a_way_is_set_replayed_and_taken_back() -> None:
    ring = MADE.algo(A, C, way="ring")
    assert [ring[name].attr("algo") for name in (A, B, C, H)] == ["ring", None, "ring", None]
    assert apply(MADE, ring.script()).digest == ring.digest != MADE.digest
    assert ring.algo(way=None).digest == MADE.digest


def test_all_that_can_go_a_way_do_where_none_is_named() -> None:
    native, ring = MADE.algo(way="native"), MADE.algo(way="ring")
    assert [native[name].attr("algo") for name in (A, B, C, H)] == ["native", "native", None, None]
    assert [ring[name].attr("algo") for name in (A, B, C, H)] == ["ring", "ring", "ring", None]


def test_a_bucket_goes_one_way() -> None:
    made = MADE.bucket(A, B).algo(B, way="direct")
    assert made[A].attr("algo") == made[B].attr("algo") == "direct"


def test_ways_that_are_not_there_or_round_are_refused() -> None:
    with pytest.raises(ProgramError, match="there are direct, ring, native"):
        MADE.algo(way="tree")
    with pytest.raises(ProgramError, match="its own for all_reduce"):
        MADE.algo(C, way="native")
    with pytest.raises(ProgramError, match="would round sums"):
        MADE.algo(H, way="ring")
    with pytest.raises(ProgramError, match="would round sums"):
        MADE.wire(A).algo(A, way="ring")
    with pytest.raises(ProgramError, match="has no collective that can use it"):
        alone.on(mesh(dp=2)).algo(way="ring")


@program
def alone(x: R[4]):
    return x + 1.0


# -- moves that cannot have what was said of the move they came of ------------------------------


@program
def below(g: P["n"], x: S(0)["n"]):
    h = language.all_reduce(g)
    whole = language.all_gather(x)
    return h, whole > 0.5


def test_a_way_that_the_halves_of_a_move_cannot_go_is_dropped() -> None:
    made = below.on(mesh(dp=4), n=8)
    native = made.algo("h", way="native").split("h")
    assert native["h.scatter"].attr("algo") is native["h.gather"].attr("algo") is None
    assert apply(made, native.script()).digest == native.digest
    ring = made.algo("h", way="ring").priority("h", 3)
    assert ring.split("h")["h.scatter"].attr("algo") == "ring"
    root = ring.split("h", into="root")
    assert [root["h.reduce"].attr(key) for key in ("algo", "priority")] == [None, 3]
    near = made.factor("dp", ("node", 2), ("local", 2)).algo("h", way="native").hier("h")
    parts = [near[f"h.{part}"].attr("algo") for part in ("scatter", "reduce", "gather")]
    assert parts == [None, "native", None]


def test_bits_that_a_move_below_does_not_have_are_not_taken_from_it() -> None:
    sunk = below.on(mesh(dp=2), n=8).wire("whole").sink("whole")
    (gather,) = [node for node in sunk.nodes if node.op == "all_gather"]
    assert (gather.type.dtype, gather.attr("wire")) == ("bool", None)
    root = below.on(mesh(dp=2), n=8).wire("h").split("h", into="root")
    assert not root.is_approximate


def test_a_wire_that_the_way_of_a_move_cannot_have_is_refused_with_the_way_out() -> None:
    made = below.on(mesh(dp=2), n=8)
    native = made.algo("h", way="native")
    with pytest.raises(ProgramError, match=r"of h in bf16: .* algo 'native'.* algo\('h', way='dir"):
        native.wire("h")
    assert native.algo("h", way="direct").wire("h")["h"].attr("wire") == "bf16"
    # Without names it is all that can.
    every = native.wire()
    assert [every[name].attr("wire") for name in ("h", "whole")] == [None, "bf16"]
    with pytest.raises(ProgramError, match=r"step 2 of 2, wire.*a ring would round sums"):
        apply(made, "algo('h', way='ring')\nwire('h')\n")
    with pytest.raises(ProgramError, match=r"sends nothing wider; all_reduce.1: it goes by algo"):
        one.on(mesh(dp=2)).algo(way="native").wire()
    with pytest.raises(ProgramError, match="send sends values as they are"):
        passed.on(mesh(dp=2)).wire("send.1")


@program
def one(h: P[4]):
    return language.all_reduce(h)


@program
def passed(x: R[4]):
    return language.send(x)


def test_what_goes_as_one_is_sent_as_one() -> None:
    made = MADE.bucket(A, B)
    wired = made.wire(B)
    assert [wired[name].attr("wire") for name in (A, B, C)] == ["bf16", "bf16", None]
    apart = made.with_nodes(n.with_attrs(wire="bf16") if n.name == A else n for n in made.nodes)
    with pytest.raises(ProgramError, match="what goes as one goes in one way"):
        verified(apart)


def test_a_ring_of_products_passes_on_what_it_has() -> None:
    @program
    def product(x: S(0)["n", "n"], w: R["n", "n"]):
        x = language.all_gather(x)
        return x @ w

    made = product.on(mesh(dp=2), n=4)
    gather = next(node.name for node in made.nodes if node.op == "all_gather")
    with pytest.raises(ProgramError, match=r"ring ring passes .* on as it is, not as bf16"):
        made.wire(gather).ring(gather, "matmul.1")
    with pytest.raises(ProgramError, match="goes round with its product in region ring"):
        made.ring(gather, "matmul.1").wire(gather)


def test_no_program_says_of_a_move_what_it_cannot_do() -> None:
    made = below.on(mesh(dp=2), n=8)
    for name, attrs, words in (
        ("whole", {"algo": "native"}, r"whole \(all_gather of f32\) cannot go by algo 'native'"),
        ("h", {"algo": "ring", "wire": "bf16"}, "f32 as bf16.* cannot go by algo 'ring'"),
        ("h", {"algo": "tree"}, "cannot go by algo 'tree'"),
        ("h", {"wire": "f64"}, r"cannot send f64; wire\('h', dtype=None\)"),
    ):
        nodes = [n.with_attrs(**attrs) if n.name == name else n for n in made.nodes]
        assert made[name].op in ("all_reduce", "all_gather")
        with pytest.raises(ProgramError, match=words):
            verified(made.with_nodes(nodes))
