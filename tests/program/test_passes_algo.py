"""Which way a collective goes round is said beside the program, where the way keeps its values."""

import pytest

from penstock.errors import ProgramError
from penstock.program import P, R, S, bf16, language, mesh, program
from penstock.program.schedule import apply


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
    with pytest.raises(ProgramError, match="has no collective that goes so"):
        alone.on(mesh(dp=2)).algo(way="ring")


@program
def alone(x: R[4]):
    return x + 1.0
