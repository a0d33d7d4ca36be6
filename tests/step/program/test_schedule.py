"""Schedules as data: text that reads back, and nothing else that is read."""

from __future__ import annotations

import inspect
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.step.program import P, R, mesh, program
from penstock.step.program.language import all_reduce, update
from penstock.step.program.nodes import Program, Rewrite
from penstock.step.program.passes import PASSES
from penstock.step.program.schedule import LINE_CHARS_MAX, apply, read_schedule, schedule_text

TEXT = """\
# RS-C-AG: Adam on slices
split('g')
sink('g.gather', below='w')

keep_sliced('m')
"""


@program
def momentum(g: P["n"], w: R["n"], m: R["n"], lr=0.1):
    g = all_reduce(g)
    m = update(m, 0.9 * m + g)
    return update(w, w - lr * m)


def test_a_schedule_prints_and_makes_the_same_program_again() -> None:
    made = apply(momentum.on(mesh(dp=2), n=6), TEXT)
    assert made.script() == "split('g')\nsink('g.gather', below='w')\nkeep_sliced('m')\n"
    again = apply(momentum.on(mesh(dp=2), n=6), made.script())
    assert again == made
    assert again.digest == made.digest


def test_methods_and_text_are_the_same_rewrites() -> None:
    start = momentum.on(mesh(dp=2), n=6)
    by_hand = start.split("g").sink("g.gather", below="w").keep_sliced("m")
    assert by_hand.script() == apply(start, TEXT).script()


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
plain |= st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
names = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
steps = st.builds(
    lambda name, args, options: Rewrite(
        name=name, args=tuple(args), options=tuple(options.items())
    ),
    st.sampled_from(sorted(PASSES)),
    st.lists(values, max_size=3),
    st.dictionaries(names, values, max_size=2),
)


@given(st.lists(steps, max_size=5))
def test_every_schedule_reads_back(schedule: list[Rewrite]) -> None:
    assert read_schedule(schedule_text(schedule)) == tuple(schedule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os')", "there is no rewrite '__import__'"),
        ("split(open('x'))", "is no argument"),
        ("split('g' + 'h')", "is no argument"),
        ("split(*names)", "is no argument"),
        ("split(**options)", "options are written one by one"),
        ("split(['g'])", "is no argument"),
        ("split({'g': 1})", "is no argument"),
        ("split(1e999)", "is no argument"),
        ("split", "is no rewrite"),
        ("os.system('x')", "is no rewrite"),
        ("split('g'); split('h')", "cannot be read"),
        ("split('g'", "cannot be read"),
        ("x = split('g')", "cannot be read"),
        ("split('g')\nfly('g')", "line 2 of the schedule"),
        ("split('" + "g" * LINE_CHARS_MAX + "')", "at most 100000 are read"),
        ("split(" + "(" * 5000 + ")" * 5000 + ")", "cannot be read"),
        ("lambda: 0", "is no rewrite"),
    ],
)
def test_what_is_no_schedule_is_not_read(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        read_schedule(text)


def test_what_does_not_print_is_refused() -> None:
    for value in (float("nan"), [1], object()):
        with pytest.raises(ProgramError, match="is no argument"):
            schedule_text([Rewrite(name="split", args=(value,))])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "split('g')\nsplit('g')",
            "step 2 of 2, split\\('g'\\): program momentum has no all_reduce",
        ),
        ("split()", "missing a required argument: 'name'"),
        ("split('g', colour=1)", "unexpected keyword argument 'colour'"),
        ("split('g', dim='first')", "'first' is no int"),
        ("factor('dp', 2)", "2 is no tuple"),
        ("factor('dp', ('a', 'b'))", "is no tuple"),
        ("sink(3)", "3 is no str"),
    ],
)
def test_a_step_that_fails_says_which_and_why(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        apply(momentum.on(mesh(dp=2), n=6), text)


def test_methods_of_a_program_show_the_arguments_of_their_rewrites() -> None:
    for name, function in PASSES.items():
        method = getattr(Program, name)
        assert str(inspect.signature(method)) == str(inspect.signature(function))
        assert method.__doc__ == function.__doc__
