"""Random programs and random rewrites: what is legal changes nothing, what is not is refused.

Hypothesis draws the random numbers, so what fails is made small and is tried again next time. For
long runs there is benchmarks/program_fuzz.py.
"""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.programs import Sample, random_program
from testkit.rewrites import applied, differences, random_rewrite, refused

from penstock.step.program.nodes import Program
from penstock.step.program.passes.dead import unread
from penstock.step.program.schedule import apply, read_schedule

GRAPH = ("split", "sink", "hoist", "keep_sliced", "dead", "hier", "factor", "reshard")
MOVES_ONLY = ("split", "keep_sliced", "dead", "reshard", "fuse", "chunk", "overlap", "bucket")
randoms = st.randoms(use_true_random=False)


def _rewritten(rng: Random, program: Program, count: int, names: tuple[str, ...] = ()) -> Program:
    for _ in range(count):
        step = random_rewrite(rng, program, names)
        after = None if step is None else applied(program, step)
        program = after or program
    return program


def _shown(sample: Sample, program: Program) -> str:
    return f"{sample.program}\n{program.script()}{program}"


@settings(max_examples=120)
@given(randoms)
def test_rewrites_of_the_graph_keep_the_meaning(rng: Random) -> None:
    sample = random_program(rng)
    program = _rewritten(rng, sample.program, 10, GRAPH)
    assert differences(sample, program) == [], _shown(sample, program)


@settings(max_examples=120)
@given(randoms)
def test_all_rewrites_together_keep_the_meaning(rng: Random) -> None:
    sample = random_program(rng)
    program = _rewritten(rng, sample.program, 12)
    assert differences(sample, program) == [], _shown(sample, program)


@settings(max_examples=60)
@given(randoms)
def test_no_rewrite_leaves_what_nobody_reads(rng: Random) -> None:
    sample = random_program(rng)
    program = _rewritten(rng, sample.program.dead(), 8, GRAPH)
    assert unread(program) == set(), _shown(sample, program)


@settings(max_examples=80)
@given(randoms)
def test_what_only_moves_work_does_not_change_a_bit(rng: Random) -> None:
    sample = random_program(rng, sums=False)
    program = _rewritten(rng, sample.program, 10, MOVES_ONLY)
    assert differences(sample, program, bitwise=True) == [], _shown(sample, program)


@settings(max_examples=40)
@given(randoms)
def test_a_rewritten_program_is_made_again_from_its_script(rng: Random) -> None:
    sample = random_program(rng)
    program = _rewritten(rng, sample.program, 10)
    again = apply(sample.program, read_schedule(program.script()))
    assert again == program
    assert again.digest == program.digest


REGIONS = ("fuse", "chunk", "bucket", "overlap", "keep_sliced", "hoist", "algo")


@settings(max_examples=80)
@given(randoms)
def test_what_has_a_plan_has_one_after_rewrites(rng: Random) -> None:
    sample = random_program(rng)
    program = _rewritten(rng, sample.program, 10, REGIONS)
    assert refused(sample.program) or not refused(program), _shown(sample, program)


def test_a_seed_makes_the_same_program_again() -> None:
    for seed in range(20):
        one, other = (random_program(Random(seed)) for _ in range(2))
        assert one.program.digest == other.program.digest
