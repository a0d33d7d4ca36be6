"""When the next source is asked for what the first does not bring, and when it is left alone."""

from __future__ import annotations

import pytest
from tests.flow.story import LATENCY_S, Story

from penstock.flow import (
    Action,
    Begin,
    Deferred,
    Failed,
    Fetch,
    Flow,
    FlowBudget,
    GiveUp,
    SourcePrior,
    Throttled,
    Waiting,
    Wanted,
)
from penstock.flow.choice import sources_for

PEER, OTHER, STORE = "peer:a", "peer:b", "store"


@pytest.fixture(autouse=True)
def no_second_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is late at its last source is another story."""
    monkeypatch.setattr("penstock.flow.hedge.HEDGES_MAX", 0)


def story(pace_s: float = 0.05, store_s: float = LATENCY_S, num_seen: int = 200) -> Story:
    """A peer that answers quickly, and a store that is known."""
    told = Story(PEER, STORE, pace_s=pace_s, num_seen=num_seen)
    told.see(num_seen, STORE, latency_s=store_s)
    return told


def asked(actions: list[Action], source: str = STORE) -> list[int]:
    return [a.number for a in actions if isinstance(a, Begin) and a.source == source]


def defer(told: Story, *numbers: int) -> list[Action]:
    return [
        action
        for n in numbers
        for action in told.flow.on(Deferred(number=n, attempt=0, at_s=told.now_s))
    ]


# -- late ------------------------------------------------------------------------------------------


def test_the_store_is_asked_after_as_long_as_the_store_would_have_taken() -> None:
    quick, slow = story(store_s=0.02), story(pace_s=0.4, store_s=0.3)
    for told, soon_s, late_s in ((quick, 0.045, 0.07), (slow, 0.3, 0.45)):
        (late,) = told.want(1)
        told.flow.on(Waiting(step=told.step, at_s=told.now_s))
        assert told.wait(soon_s) == []
        assert told.wait(late_s - soon_s) == [Begin(number=late, attempt=1, source=STORE)]


def test_every_near_request_of_a_slow_peer_is_asked_of_the_store_and_each_once() -> None:
    told = story()
    late = told.want(8)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert asked(told.wait(0.2)) == late
    assert asked(told.wait(10.0)) == []


def test_no_peer_runs_out_of_tokens() -> None:
    told = story()
    for _ in range(100):
        (late,) = told.want(1)
        told.flow.on(Waiting(step=told.step, at_s=told.now_s))
        assert asked(told.wait(0.1)) == [late]
        told.arrive(late, attempt=1)
        told.consume()
        told.now_s += 0.4
        told.arrive(late)


def test_a_slow_peer_that_is_far_ahead_of_the_steps_is_left_alone() -> None:
    told = story(pace_s=0.05)
    (late,) = told.want(1, ahead=40)
    assert told.wait(1.0) == [], "2 s ahead of its step; the store takes 20 ms"
    told.arrive(late)
    assert told.flow.num_hedges == 0


def test_a_store_that_asks_us_to_slow_down_is_not_asked_for_what_a_peer_owes() -> None:
    told = story()
    told.want(1)
    for _ in range(5):
        told.flow.on(Throttled(source=STORE, at_s=told.now_s))
        assert told.wait(0.3) == []
    assert len(asked(told.wait(1.0))) == 1


def test_an_unknown_store_is_asked_by_what_the_peer_usually_takes() -> None:
    told = Story(PEER, STORE, pace_s=0.05)
    (late,) = told.want(1)
    assert told.wait(0.05) == []
    assert asked(told.wait(0.2)) == [late]


def test_where_nothing_is_known_a_second_is_long_enough_and_a_prior_is_knowledge() -> None:
    prior = SourcePrior(latency_s=0.02, latency_p99_s=0.05, bytes_s=1e8)
    for known, least_s in (({}, 1.0), ({STORE: prior}, 0.05)):
        told = Story(PEER, STORE, num_seen=0)
        told.flow = Flow(budget=FlowBudget(stage_bytes_max=10_000), prior=known)
        (late,) = told.want(1)
        assert told.wait(0.9 * least_s) == []
        assert asked(told.wait(0.3 * least_s)) == [late]


def test_before_the_pace_is_known_only_the_first_steps_are_near() -> None:
    told = Story(PEER, STORE, num_seen=0)
    near, far = told.want(1, ahead=2), told.want(1, ahead=3)
    assert asked(told.wait(5.0)) == near
    assert told.flow.in_flight(PEER) == len(near + far)


def test_two_peers_are_asked_before_the_store_each_in_its_time() -> None:
    told = Story(PEER, OTHER, STORE, pace_s=0.05)
    told.see(200, OTHER)
    told.see(200, STORE)
    (late,) = told.want(1)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert told.wait(0.08) == [Begin(number=late, attempt=1, source=OTHER)]
    assert told.wait(0.08) == [Begin(number=late, attempt=2, source=STORE)]


def test_a_second_peer_that_fails_does_not_hide_that_the_first_one_hangs() -> None:
    told = Story(PEER, OTHER, STORE, pace_s=0.05)
    told.see(200, OTHER)
    told.see(200, STORE)
    (late,) = told.want(1)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    told.wait(0.08)
    assert told.flow.on(Failed(number=late, attempt=1, at_s=told.now_s)) == []
    assert told.wait(0.08) == [Begin(number=late, attempt=2, source=STORE)]


def test_a_failure_while_the_next_source_is_full_waits_for_its_turn_there() -> None:
    told = story()
    level = told.flow.limit(STORE)
    busy = told.number + level
    told.sources = (STORE,)
    told.want(level)
    told.sources = (PEER, STORE)
    (late,) = told.want(1)
    assert late == busy
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    told.wait(0.2)
    assert told.flow.on(Failed(number=late, attempt=0, at_s=told.now_s)) == []
    assert asked(told.arrive(busy - 1)) == [late]


def test_what_arrives_while_it_waits_for_the_next_source_is_not_asked_for_there() -> None:
    told = story()
    level = told.flow.limit(STORE)
    told.sources = (STORE,)
    others = told.want(level)
    told.sources = (PEER, STORE)
    (late,) = told.want(1)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    told.wait(0.2)
    told.arrive(late)
    assert asked(told.arrive(others[0])) == []


# -- what waits for a slow source ------------------------------------------------------------------


def test_what_waits_for_a_place_at_a_slow_peer_goes_to_the_store_when_it_is_near() -> None:
    told = story()
    level = told.flow.limit(PEER)
    first = told.want(level)
    waiting, far = told.want(3), told.want(3, ahead=400)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert asked(told.wait(0.1)) == first
    assert told.flow.in_flight(PEER) == level
    actions = [action for n in first[:4] for action in told.arrive(n, attempt=1) + told.wait(0.05)]
    moved = [a for a in actions if isinstance(a, Begin) and a.source == STORE]
    assert [a.number for a in moved] == waiting
    assert all(a.attempt == 0 for a in moved), "the peer was never asked"
    assert not {a.number for a in actions if isinstance(a, Begin)} & set(far)


def test_one_straggler_moves_nobody_else_out_of_the_line() -> None:
    told = story()
    level = told.flow.limit(PEER)
    (straggler,) = told.want(1)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    told.want(4 * level)
    begun: list[int] = []
    for number in range(straggler + 1, told.number):
        told.now_s += 0.002
        begun += asked(told.arrive(number))
    assert begun == [straggler]


def test_a_line_at_a_slow_peer_fills_no_store_that_has_nearer_work() -> None:
    told = story()
    level, store_level = told.flow.limit(PEER), told.flow.limit(STORE)
    told.sources = (STORE,)
    told.want(store_level + 4)
    told.sources = (PEER, STORE)
    told.want(level + 5)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert asked(told.wait(0.5)) == []


# -- deferred --------------------------------------------------------------------------------------


def test_a_deferred_request_gives_its_place_away_and_is_not_late() -> None:
    told = story()
    level = told.flow.limit(PEER)
    numbers = told.want(3 * level)
    assert told.flow.in_flight(PEER) == level
    begun = defer(told, *numbers[:level])
    assert asked(begun, PEER) == numbers[level : 2 * level]
    defer(told, *numbers[level : 2 * level])
    defer(told, *numbers[2 * level :])
    assert (told.flow.in_flight(PEER), len(told.flow._deferred)) == (0, 3 * level)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert told.wait(4.9) == []
    assert told.flow.stage_bytes == 3 * level * 1000


def test_a_deferred_answer_teaches_no_latency_but_counts_as_delivered() -> None:
    told = story()
    before = told.flow.rates().sources[PEER]
    for _ in range(100):
        (number,) = told.want(1)
        defer(told, number)
        told.now_s += 3.0
        assert told.arrive(number) == []
        told.consume()
    after = told.flow.rates().sources[PEER]
    assert after.latency_p50_s == before.latency_p50_s
    assert after.latency_p99_s == before.latency_p99_s
    assert 0 < after.bytes_s < 1000, "1000 bytes in three seconds"
    assert (told.flow.in_flight(PEER), len(told.flow._deferred)) == (0, 0)


def test_a_deferred_fetch_that_fails_goes_on_with_the_next_source() -> None:
    told = story()
    (number,) = told.want(1)
    defer(told, number)
    failed = told.flow.on(Failed(number=number, attempt=0, at_s=told.now_s))
    assert failed == [Begin(number=number, attempt=1, source=STORE)]
    assert told.flow.on(Failed(number=number, attempt=1, at_s=told.now_s)) == [
        GiveUp(number=number)
    ]


def test_a_training_loop_that_waits_for_five_seconds_turns_to_the_store() -> None:
    told = story()
    (near,) = told.want(1)
    (far,) = told.want(1, ahead=100)
    defer(told, near, far)
    told.wait(0.1)
    assert told.flow.wake_s is None, "nothing to look at before the training loop waits"
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert told.wait(4.9) == []
    assert told.wait(0.2) == [Begin(number=near, attempt=1, source=STORE)]
    assert told.wait(20.0) == []
    assert told.arrive(near, attempt=1) == []
    assert told.arrive(near) == []
    assert len(told.flow._deferred) == 1


def test_where_the_store_itself_is_behind_it_is_not_asked_for_deferred_bytes() -> None:
    told = story()
    (parked,) = told.want(1)
    defer(told, parked)
    told.sources = (STORE,)
    (own,) = told.want(1)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert parked not in asked(told.wait(30.0))
    told.arrive(own)
    assert asked(told.wait(1.0)) == [parked]


def test_a_peer_that_is_behind_costs_one_long_wait_until_it_brings_something() -> None:
    told = story()
    for first in (True, False):
        (parked,) = told.want(1)
        defer(told, parked)
        at_once = told.flow.on(Waiting(step=told.step, at_s=told.now_s))
        assert asked(at_once + told.wait(1.0)) == ([] if first else [parked])
        assert asked(told.wait(5.0)) == ([parked] if first else [])
        told.arrive(parked, attempt=1)
        told.consume()
    (parked, later) = told.want(2, ahead=100)
    defer(told, parked, later)
    told.arrive(parked)
    told.flow.on(Waiting(step=told.step + 100, at_s=told.now_s))
    assert told.wait(4.0) == [], "it got on, and is waited for as before"


def test_store_reads_for_later_steps_are_no_reason_to_wait_for_a_deferred_one() -> None:
    told = story()
    (parked,) = told.want(1)
    defer(told, parked)
    told.sources = (STORE,)
    told.want(1, ahead=3)
    told.flow.on(Waiting(step=told.step, at_s=told.now_s))
    assert parked in asked(told.wait(6.0))


def test_deferred_fills_leave_room_for_others() -> None:
    flow = Flow(budget=FlowBudget(stage_bytes_max=400))
    attempts = [
        Fetch(number=n, step=0, size_bytes=100, sources=(PEER,), staged=False) for n in range(3)
    ]
    own = Fetch(number=3, step=0, size_bytes=100, sources=(STORE,), staged=False)
    begun = flow.on(Wanted(fetches=(*attempts, own), at_s=0.0))
    for number in range(3):
        assert asked(begun, PEER) == [number]
        begun = flow.on(Deferred(number=number, attempt=0, at_s=0.1))
    assert asked(begun) == [3]
    assert flow.planned_fill_bytes == 400


def test_what_is_deferred_twice_or_unknown_changes_nothing() -> None:
    told = story()
    (number,) = told.want(1)
    defer(told, number, number, 10**6)
    assert (told.flow.in_flight(PEER), len(told.flow._deferred)) == (0, 1)
    assert told.arrive(number) == []
    told.consume()
    assert (told.flow.stage_bytes, len(told.flow._deferred)) == (0, 0)


# -- which sources ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holders", "dead", "sources"),
    [
        (["a"], "", ("peer:a", "store")),
        (["a", "b", "c"], "", ("peer:a", "peer:b", "store")),
        (["a", "b", "c"], "a", ("peer:b", "peer:c", "store")),
        (["a", "b"], "ab", ("store",)),
        (["a", "a"], "", ("peer:a", "store")),
        ([], "", ("store",)),
    ],
)
def test_usable_holders_come_before_the_store(
    holders: list[str], dead: str, sources: tuple[str, ...]
) -> None:
    assert sources_for([name for name in holders if name not in dead], "store") == sources
