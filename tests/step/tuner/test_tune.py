"""The tuner finds what is faster, takes it only if it is, and never what was not allowed."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.step.ranks import run_ranks
from tests.step.tuner import work as tune_work
from tests.step.tuner.simulated import Simulated, race

from penstock.errors import ProgramError
from penstock.step.program import Program, mesh
from penstock.step.program.cost import Link, MachineCosts
from penstock.step.program.lower import lower
from penstock.step.program.schedule import apply
from penstock.step.program.simulate import simulate
from penstock.step.tuner.race import Race
from penstock.step.tuner.search import Search, search
from penstock.step.tuner.tune import tune

SLOW = MachineCosts(links=(("", Link(bytes_s=120e6, latency_s=200e-6)),), flops_s=95e9)
"""About a gigabit a second."""
FREE = MachineCosts(
    links=(("", Link(bytes_s=1e15, latency_s=0.0, cpu_s=0.0)),), memory_bytes_s=1e15
)
BLOCK = tune_work.block_on(2, t=2048, k=2048, h=1024)
MOMENTUM = tune_work.momentum.on(mesh(dp=2), n=1 << 22)


@cache
def _momentums(*allow: str) -> Search:
    return search(MOMENTUM, SLOW, allow=allow)


@cache
def _blocks() -> Search:
    return search(BLOCK, SLOW)


def _names(made: Program) -> set[str]:
    return {rewrite.name for rewrite in made.history}


# -- looking -----------------------------------------------------------------------------------


def test_a_search_finds_schedules_as_good_as_those_made_by_hand() -> None:
    found = _blocks()
    hand = [
        BLOCK.apply("chunk", k, "matmul.1", *(n.name for n in BLOCK.nodes[-3:])).apply("overlap")
        for k in (4, 8, 16)
    ]
    best_s = min(simulate(lower(made), SLOW).step_s for made in hand)
    assert found.candidates[0].predicted_s <= best_s * 1.001


def test_every_program_is_found_once_and_the_one_given_is_among_them() -> None:
    found = _momentums("sliced", "bf16")
    digests = [candidate.program.digest for candidate in found.candidates]
    assert len(set(digests)) == len(digests)
    assert MOMENTUM.digest in digests
    predicted = [candidate.predicted_s for candidate in found.candidates]
    assert predicted == sorted(predicted)


def test_what_is_not_allowed_is_not_tried() -> None:
    for candidate in _momentums().candidates:
        assert not _names(candidate.program) & {"wire", "keep_sliced"}
    allowed = _momentums("sliced", "bf16").candidates
    assert {"wire", "keep_sliced"} <= set().union(*(_names(c.program) for c in allowed))


def test_what_is_returned_is_never_kept_in_slices() -> None:
    for candidate in _momentums("sliced", "bf16").candidates:
        made = candidate.program
        assert [made[o].type for o in made.outputs] == [MOMENTUM[o].type for o in MOMENTUM.outputs]


def test_nonsense_cannot_be_allowed() -> None:
    with pytest.raises(ProgramError, match="tune cannot allow 'int3'"):
        search(MOMENTUM, SLOW, allow=("int3",))


def test_a_search_ends_when_its_time_is_up() -> None:
    ticks = iter(range(1_000_000))
    found = search(MOMENTUM, SLOW, budget_s=5.0, clock=lambda: float(next(ticks)))
    assert found.num_tried <= 6
    assert found.candidates


def test_those_that_are_measured_differ() -> None:
    best = _blocks().next(8, {BLOCK.digest: 1.0})
    assert 1 < len(best) <= 8
    assert BLOCK.digest not in {candidate.program.digest for candidate in best}
    kinds = [candidate.kind for candidate in best]
    assert len(set(kinds)) == len(kinds)


def test_what_was_measured_says_what_to_measure_next() -> None:
    # Whatever is split takes twice as long as the model believes.
    found = _blocks()
    first = found.next(4, {BLOCK.digest: 1.0})
    assert any("split" in candidate.shape for candidate in first)
    known = {BLOCK.digest: 1.0}
    as_written_s = next(c.predicted_s for c in found.candidates if c.program == BLOCK)
    for candidate in first:
        off = 2.0 if "split" in candidate.shape else 1.0
        known[candidate.program.digest] = off * candidate.predicted_s / as_written_s
    after = found.next(4, known)
    assert "split" not in after[0].shape
    wrong = {c.kind for c in first if "split" in c.shape}
    assert not any(candidate.kind in wrong for candidate in after)
    assert not {c.program.digest for c in after} & set(known)


def test_gradients_are_sent_while_others_are_computed() -> None:
    made = tune_work.backward.on(mesh(dp=2), b=2048, n=1024)
    best = search(made, SLOW).candidates[0]
    before, after = (simulate(lower(each), SLOW) for each in (made, best.program))
    assert "overlap" in best.shape
    assert before.exposed_s == pytest.approx(before.communication_s)
    # The last one has nothing left to hide behind.
    assert after.exposed_s < 0.7 * before.exposed_s


def test_the_way_round_is_chosen_by_what_each_takes() -> None:
    slow, fast = Link(bytes_s=50e6), Link(bytes_s=500e6)
    links = {"dp": slow, "dp/all_reduce/direct": slow, "dp/all_reduce/ring": fast}
    made = tune_work.momentum.on(mesh(dp=8), n=1 << 20)
    best = search(made, replace(SLOW, links=tuple(links.items()))).candidates[0].program
    ways = {node.attr("algo") for node in best.nodes if node.op == "all_reduce"}
    assert ways == {"ring"}
    assert apply(made, best.script()).digest == best.digest


# -- racing ------------------------------------------------------------------------------------


def _raced(times: Sequence[Callable[[], float]], rounds: int = 10_000) -> tuple[int, int]:
    left = iter(range(rounds))
    how = Race(
        run=lambda number: times[number](),
        slowest=list,
        has_time=lambda: next(left, None) is not None,
    )
    result = race(len(times), how)
    return result.winner, result.num_runs


def test_the_fastest_wins() -> None:
    assert _raced([lambda: 1.0, lambda: 0.9, lambda: 0.5, lambda: 1.4])[0] == 2


def test_a_gain_below_three_in_a_hundred_changes_nothing() -> None:
    assert _raced([lambda: 1.0, lambda: 0.98])[0] == 0
    assert _raced([lambda: 1.0])[0] == 0


def test_noise_wins_less_than_once_in_fifty_races() -> None:
    # Six runs that are the same, each off by up to 40 %: whoever wins has been lucky.
    won = 0
    for seed in range(300):
        draw = random.Random(seed)
        times = [lambda draw=draw: 1.0 + 0.4 * draw.random() for _ in range(6)]
        won += _raced(times)[0] != 0
    assert won < 300 / 50


def test_a_large_gain_wins_in_spite_of_noise() -> None:
    draw = random.Random(1)
    slow, fast = (lambda: 1.0 + 0.2 * draw.random()), (lambda: 0.6 + 0.2 * draw.random())
    assert _raced([slow, fast])[0] == 1


def test_a_race_without_time_still_compares_in_pairs() -> None:
    winner, num_runs = _raced([lambda: 1.0, lambda: 0.5, lambda: 0.6, lambda: 0.7], rounds=0)
    assert winner == 1
    assert num_runs == 4 + 2 * 3


# -- both --------------------------------------------------------------------------------------


def test_it_takes_the_schedule_that_is_measured_to_be_faster() -> None:
    tuned = tune(BLOCK, costs=SLOW, measure=Simulated(SLOW), cache=None)
    assert tuned.is_changed
    assert tuned.seconds < tuned.baseline_s / 1.4
    assert {"chunk", "overlap"} <= {rewrite.name for rewrite in tuned.schedule}
    assert "×" in str(tuned)


def test_the_program_stays_where_nothing_is_faster() -> None:
    tuned = tune(BLOCK, costs=FREE, measure=Simulated(FREE), cache=None)
    assert tuned.program == BLOCK
    assert "stays as it is" in str(tuned)


def test_a_model_that_is_wrong_does_no_harm() -> None:
    # The model believes in the overlap, the machine punishes it.
    penal = Simulated(SLOW, lambda made: 3.0 if made.regions else 1.0)
    tuned = tune(BLOCK, costs=SLOW, measure=penal, cache=None)
    assert any(tried.seconds > 2 * tried.predicted_s for tried in tuned.tried)
    assert tuned.program == BLOCK


def test_half_the_bits_win_only_where_they_are_allowed() -> None:
    exact, rough = (_momentums(*allow).candidates[0] for allow in ((), ("sliced", "bf16")))
    assert not exact.program.is_approximate
    assert rough.program.is_approximate
    assert rough.predicted_s < exact.predicted_s


def test_what_was_found_is_kept_by_program_and_mesh(tmp_path: Path) -> None:
    args = {"costs": SLOW, "cache": tmp_path, "measure": Simulated(SLOW)}
    small = tune_work.block_on(2, k=512)
    first = tune(small, **args)
    again = tune(small, **args)
    assert again.is_cached
    assert again.program.digest == first.program.digest
    assert again.seconds == first.seconds
    other = tune(tune_work.block_on(4, k=512), **args)
    assert not other.is_cached


def test_what_cannot_be_used_again_is_found_anew(tmp_path: Path) -> None:
    args = {"costs": FREE, "cache": tmp_path, "measure": Simulated(FREE)}
    small = tune_work.block_on(2)
    tune(small, **args)
    for text in ("", "{}", '{"speeds": {}, "schedule": "split(\'nothing\')"}', "\x00", "[]"):
        for path in tmp_path.iterdir():
            path.write_text(text)
        assert not tune(small, **args).is_cached


def test_a_program_with_a_schedule_keeps_it() -> None:
    begun = BLOCK.apply("split", BLOCK.nodes[-3].name)
    tuned = tune(begun, costs=SLOW, measure=Simulated(SLOW), cache=None)
    assert tuned.program.history[:1] == begun.history
    assert all(rewrite not in begun.history for rewrite in tuned.schedule)


def test_it_needs_something_to_measure_with() -> None:
    with pytest.raises(ProgramError, match="needs groups and inputs"):
        tune(BLOCK)


# -- on ranks ----------------------------------------------------------------------------------


def test_ranks_agree_on_a_schedule_that_makes_the_same_values(tmp_path: Path) -> None:
    said = run_ranks(tune_work.tune_block, 2, str(tmp_path))
    assert len({each["digest"] for each in said}) == 1
    for each in said:
        # A function and its inputs are a program, with the sizes that they have together.
        assert each["baseline"] == tune_work.block_on(2).digest
        assert each["off"] < 1e-4
        assert each["is_untouched"]
        assert each["num_measured"] >= 1
        # It is used again, but not where the network is ten times as fast.
        assert each["again"] == (True, each["digest"])
        assert not each["other"]


def test_what_fails_on_one_rank_is_dropped_by_all_and_told_to_all() -> None:
    said = run_ranks(tune_work.tune_failing, 2, group_timeout_s=60.0)
    assert said[0] == said[1]
    is_changed, num_measured, prepared, ran, is_usable = said[0]
    assert (is_changed, num_measured) == ("False", "0")
    assert "rank 1 cannot run block: MemoryError: no room here" in prepared
    assert "rank 1 cannot run called: ValueError: rank has no twice" in ran
    assert is_usable == "True"


def test_a_step_that_drifts_says_so_and_is_tuned_again_by_all() -> None:
    said = run_ranks(tune_work.watch, 2)
    assert [each["drifted"] for each in said] == [True, False]
    assert [len(each["warned"]) for each in said] == [1, 0]
    for each in said:
        assert not each["early"]
        assert each["tuned"]
        assert not each["after"]
        assert each["seconds"] > 1e-6
        assert each["off"] < 1e-4


def test_states_are_cut_for_schedules_that_keep_them_in_slices() -> None:
    (one, count), other = run_ranks(tune_work.tune_sliced, 2)
    assert [one, count] == other
    assert int(count) >= 1


def test_ranks_with_different_programs_are_told() -> None:
    said = run_ranks(tune_work.tune_differing, 2)
    assert all("ranks 0 and 1 have different plans" in each for each in said)


def test_collectives_make_the_same_by_each_way() -> None:
    for each in run_ranks(tune_work.by_each_way, 3):
        wanted = each.pop("as it is")
        assert len(each) == 6
        for found in each.values():
            assert found == pytest.approx(wanted, abs=1e-5)


def test_all_ranks_have_the_costs_that_were_measured_once(tmp_path: Path) -> None:
    mine, others = run_ranks(tune_work.calibrated, 2, str(tmp_path))
    assert mine == others
    first, again, other, shared = (MachineCosts.from_json(each) for each in mine)
    assert again == first
    assert other != first  # The network has changed.
    assert first.measured
    assert first.link("dp", "all_reduce").bytes_s > 1e6
    assert first.link("dp", "all_gather", "ring") != first.link("dp", "all_gather", "direct")
    assert first.link("dp", "all_reduce") == first.link("dp", "all_reduce", "native")
    assert first.cores == len(os.sched_getaffinity(0)) / 2
    assert not first.link("dp", "all_reduce").is_memory
    assert shared.link("dp", "all_reduce").is_memory
