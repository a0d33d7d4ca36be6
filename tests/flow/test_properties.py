"""Whatever happens in whatever order, a flow keeps to its limits and gets everything done."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flow import (
    Arrived,
    Begin,
    Consumed,
    Deferred,
    Event,
    Failed,
    Fetch,
    Flow,
    FlowBudget,
    GiveUp,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.flow.hedge import HEDGES_MAX
from penstock.flow.source import BEATEN_MAX

SOURCES = (("store",), ("peer", "store"), ("disk", "peer", "store"))


class World:
    """Plays everything around a flow, at random, and checks each of its answers."""

    def __init__(self, data: st.DataObject, *, num_steps: int) -> None:
        self.data = data
        self.stage_bytes_max = data.draw(st.integers(1, 400))
        self.budget = FlowBudget(
            stage_bytes_max=self.stage_bytes_max, requests_max=data.draw(st.integers(1, 12))
        )
        self.flow = Flow(budget=self.budget)
        self.num_steps = num_steps
        self.events: list[Event] = []
        self.answers: list[object] = []
        self.now_s = 0.0
        self.fetches: dict[int, Fetch] = {}
        self.in_flight: dict[tuple[int, int], str] = {}
        self.deferred: dict[tuple[int, int], str] = {}
        self.attempts: Counter[int] = Counter()
        self.asked: defaultdict[int, list[str]] = defaultdict(list)
        self.staged: dict[int, int] = {}
        """Bytes of each fetch that began and whose step is still to come."""
        self.settled: set[int] = set()
        """Arrived or given up."""
        self.arrived: set[int] = set()
        self.next_step = self.step = 0

    def tell(self, event: Event) -> None:
        before = dict(self.in_flight)
        answer = self.flow.on(event)
        self.events.append(event)
        self.answers.append(answer)
        for action in answer:
            if isinstance(action, Begin):
                self.begin(action)
            else:
                self.give_up(action)
        for source in {name for key, name in self.in_flight.items() if key not in before}:
            assert self.flow.in_flight(source) <= self.flow.limit(source) + BEATEN_MAX
        assert Counter(self.in_flight.values()) == Counter(
            {s: n for s in ("store", "peer", "disk") if (n := self.flow.in_flight(s))}
        )
        assert len(self.flow._deferred) == len(self.deferred)
        self.check_stage()

    def begin(self, action: Begin) -> None:
        fetch = self.fetches[action.number]
        assert action.attempt == self.attempts[action.number], "copies are numbered from 0"
        assert action.number not in self.settled, "nobody needs it"
        assert action.source in fetch.sources
        asked = self.asked[action.number]
        places = [fetch.sources.index(source) for source in (*asked, action.source)]
        assert places == sorted(places), "sources are asked in their order"
        assert action.source == fetch.sources[-1] or action.source not in asked
        asked.append(action.source)
        if action.source == fetch.sources[0]:
            self.check_order(fetch)
        self.attempts[action.number] += 1
        assert self.attempts[action.number] <= len(fetch.sources) + HEDGES_MAX
        self.in_flight[action.number, action.attempt] = action.source
        if fetch.staged and fetch.step >= self.step:
            self.staged[action.number] = fetch.size_bytes

    def check_order(self, fetch: Fetch) -> None:
        for other in self.fetches.values():
            if other.number in self.settled or self.attempts[other.number]:
                continue
            if other.sources[0] == fetch.sources[0] and other.staged == fetch.staged:
                assert (fetch.step, fetch.number) <= (other.step, other.number)

    def check_stage(self) -> None:
        """All but the batch that is next fits into the budget."""
        steps = {n: self.fetches[n].step for n in self.staged}
        next_step = min((step for step in steps.values() if step >= self.step), default=self.step)
        later = [self.fetches[n].size_bytes for n, step in steps.items() if step > next_step]
        assert sum(later) <= self.stage_bytes_max

    def give_up(self, action: GiveUp) -> None:
        assert self.asked[action.number][-1] == self.fetches[action.number].sources[-1]
        assert not self.is_open(action.number)
        self.settle(action.number)
        self.staged.pop(action.number, None)

    def is_open(self, number: int) -> bool:
        return any(n == number for n, _ in (*self.in_flight, *self.deferred))

    def settle(self, number: int) -> None:
        self.settled.add(number)

    # -- what can happen -----------------------------------------------------------------------

    def want(self) -> None:
        if self.next_step == self.num_steps:
            return
        fetches = []
        for _ in range(self.data.draw(st.integers(0, 4))):
            number = len(self.fetches)
            fetch = Fetch(
                number=number,
                step=self.next_step,
                size_bytes=self.data.draw(st.integers(0, 200)),
                sources=self.data.draw(st.sampled_from(SOURCES)),
                staged=self.data.draw(st.integers(0, 3)) > 0,
            )
            self.fetches[number] = fetch
            fetches.append(fetch)
        self.next_step += 1
        self.tell(Wanted(fetches=tuple(fetches), at_s=self.now_s))

    def answer(self, may_fail: bool = True) -> None:
        if not (self.in_flight or self.deferred):
            return
        key = self.data.draw(st.sampled_from(sorted(self.in_flight | self.deferred)))
        self.in_flight.pop(key, None)
        self.deferred.pop(key, None)
        number, attempt = key
        if may_fail and self.data.draw(st.integers(0, 4)) == 0:
            if number in self.settled:
                self.staged.pop(number, None)
            self.tell(Failed(number=number, attempt=attempt, at_s=self.now_s))
            return
        fetch = self.fetches[number]
        if number in self.settled or fetch.step < self.step:
            self.staged.pop(number, None)
        self.settle(number)
        self.arrived.add(number)
        moved = self.data.draw(st.booleans())
        self.tell(Arrived(number=number, attempt=attempt, at_s=self.now_s, moved=moved))

    def answer_again(self) -> None:
        if self.fetches:
            number = self.data.draw(st.sampled_from(sorted(self.fetches)))
            attempt = self.data.draw(st.integers(0, 5))
            if (number, attempt) not in self.in_flight | self.deferred:
                self.tell(Deferred(number=number, attempt=attempt, at_s=self.now_s))
                self.tell(Arrived(number=number, attempt=attempt, at_s=self.now_s))
                self.tell(Failed(number=number, attempt=attempt, at_s=self.now_s))

    def defer(self) -> None:
        """Mostly peers do; a flow does not care."""
        if self.in_flight:
            key = self.data.draw(st.sampled_from(sorted(self.in_flight)))
            self.deferred[key] = self.in_flight.pop(key)
            self.tell(Deferred(number=key[0], attempt=key[1], at_s=self.now_s))

    def consume(self) -> None:
        if self.step == self.next_step:
            return
        needed = {f.number for f in self.fetches.values() if f.step == self.step and f.staged}
        if needed - self.settled:
            self.tell(Waiting(step=self.step, at_s=self.now_s))
            return
        self.staged = {n: s for n, s in self.staged.items() if n not in needed & self.arrived}
        self.step += 1
        self.tell(Consumed(step=self.step - 1, at_s=self.now_s))

    def throttle(self) -> None:
        self.tell(Throttled(source="store", at_s=self.now_s))

    def tick(self) -> None:
        self.now_s += self.data.draw(st.sampled_from([0.001, 0.02, 3.0]))
        self.tell(Tick(at_s=self.now_s))

    def finish(self) -> None:
        """From here on sources work and the consumer consumes: all must come to its end."""
        turns = 0
        while self.step < self.num_steps or self.in_flight or self.deferred:
            turns += 1
            assert turns < 10_000, "the flow is stuck"
            self.now_s += 0.01
            self.want()
            self.answer(may_fail=False)
            self.consume()
        assert self.settled == set(self.fetches), "all that is wanted is settled"
        assert self.flow.stage_bytes == self.flow.planned_bytes == 0
        assert self.flow.planned_fill_bytes == 0


@pytest.fixture(autouse=True, scope="module")
def _eager_hedges() -> Iterator[None]:
    """So few requests would never earn a second copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.flow.hedge.SEEN_MIN", 2)
        patch.setattr("penstock.flow.flow.TOKEN_SHARE", 1.0)
        yield


def played(data: st.DataObject) -> World:
    world = World(data, num_steps=data.draw(st.integers(1, 12)))
    does = [
        world.want,
        world.answer,
        world.answer,
        world.answer,
        world.defer,
        world.consume,
        world.consume,
        world.throttle,
        world.tick,
        world.answer_again,
    ]
    for _ in range(data.draw(st.integers(0, 40))):
        data.draw(st.sampled_from(does))()
    world.finish()
    return world


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_limits_hold_and_nothing_gets_stuck(data: st.DataObject) -> None:
    world = played(data)
    for number, fetch in world.fetches.items():
        assert world.attempts[number] > 0, f"{fetch} never began"


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_same_events_give_the_same_actions(data: st.DataObject) -> None:
    world = played(data)
    flow = Flow(budget=world.budget)
    assert [flow.on(event) for event in world.events] == world.answers
