"""One node's view of the others, and that all views come to agree."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.peers.base import Address
from penstock.engine.peers.facts import (
    GOSSIP_BYTES_MAX,
    Fact,
    MemberReport,
    MembershipFacts,
    NodeRecord,
    decoded,
)
from penstock.engine.peers.members import Member, Members
from penstock.errors import OptionError


def member(node: int, incarnation: int = 1) -> Member:
    return Member(
        name=f"{node:032x}",
        node=node,
        addresses=(Address(host=f"10.0.0.{incarnation}", port=7000 + node % 1000),),
        capacity_bytes=1 << 40,
        incarnation=incarnation,
        host=f"host-{node}",
    )


def views(num_nodes: int) -> list[Members]:
    roster = [member(node) for node in range(num_nodes)]
    return [Members(roster, me=one.name) for one in roster]


NAMES = [member(node).name for node in range(4096)]


def tell(speaker: int, listener: int, of: list[Members], at_s: float = 0.0) -> None:
    of[listener].hear(NAMES[speaker], of[speaker].say(), at_s)


def tried_at_s(view: Members, peer: str, since_s: float) -> float:
    """Return when a suspect is to be tried again, in whole seconds."""
    return next(at_s for at_s in itertools.count(since_s) if peer in view.due(at_s))


# -- suspicion --------------------------------------------------------------------------------


def test_a_silent_peer_is_tried_all_the_time_and_an_answer_ends_it() -> None:
    a, b = views(3)[0], NAMES[1]
    a.silent(b, "lost", 0.0)
    at_s = 0.0
    while at_s < 1000:
        a.silent(b, "lost", at_s + 0.01)  # A second request that failed with the first.
        assert not a.is_usable(b, at_s + 100)
        tried_s = tried_at_s(a, b, at_s)
        assert a.due(tried_s - 1.01) == ()
        # Whenever its link is back, it is used again after little more than an eighth of its cut.
        assert tried_s - at_s <= min(30, max(1, at_s / 8)) + 1
        at_s = tried_s
        a.silent(b, "lost", at_s)
    assert tried_at_s(a, b, at_s) - at_s == 30
    a.heard(b, at_s)
    assert a.is_usable(b, at_s)
    assert a.suspects == frozenset()


def test_a_peer_that_comes_and_goes_is_tried_less_and_less() -> None:
    a, b = views(3)[0], NAMES[1]
    at_s, waits = 0.0, []
    for _ in range(7):
        a.silent(b, "lost", at_s)
        waits.append(tried_at_s(a, b, at_s) - at_s)
        at_s += waits[-1]
        a.heard(b, at_s)
        at_s += 3
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    a.silent(b, "lost", at_s + 100)
    assert tried_at_s(a, b, at_s + 100) == at_s + 101  # Long forgiven.


def test_a_peer_that_does_not_know_us_is_left_alone_for_longer() -> None:
    a, b = views(3)[0], NAMES[1]
    a.silent(b, "refused", 0.0)
    assert tried_at_s(a, b, 0.0) == 30


@pytest.mark.parametrize("kind", ["broken", "stuck", "refused"])
def test_that_a_peer_answers_does_not_make_its_bytes_better(kind: str) -> None:
    a, b = views(2)[0], NAMES[1]
    a.silent(b, kind, 5.0)
    a.heard(b, 5.5)
    assert b in a.suspects
    a.heard(b, 35.0 if kind == "refused" else 6.0)
    assert b not in a.suspects


def test_names_that_nobody_has_are_ignored() -> None:
    a = views(2)[0]
    a.silent("@10.0.0.9:1", "lost", 0.0)
    a.heard("nobody", 0.0)
    a.silent(NAMES[0], "lost", 0.0)
    assert (a.suspects, a.say()) == (frozenset(), b"")


# -- loss -------------------------------------------------------------------------------------


def test_a_node_is_lost_when_two_others_say_so_and_found_when_one_takes_it_back() -> None:
    nodes = views(4)
    nodes[0].silent(NAMES[1], "lost", 2.0)
    tell(0, 3, nodes, 2.0)
    assert [view.lost for view in nodes] == [frozenset()] * 4
    nodes[2].silent(NAMES[1], "lost", 2.1)
    tell(2, 3, nodes, 2.1)
    assert nodes[3].lost == {NAMES[1]}
    assert not nodes[3].is_usable(NAMES[1], 2.1)
    assert nodes[3].suspects == frozenset()
    assert nodes[3].version == 1
    nodes[0].heard(NAMES[1], 4.0)
    tell(0, 3, nodes, 4.0)
    tell(2, 3, nodes, 4.0)
    assert nodes[3].lost == frozenset()
    assert nodes[3].version == 2


@pytest.mark.parametrize(("num_nodes", "silent"), [(2, [1]), (3, [1, 2]), (5, [1, 2, 3, 4])])
def test_the_last_one_left_decides_alone(num_nodes: int, silent: list[int]) -> None:
    view = views(num_nodes)[0]
    for node in silent:
        view.silent(NAMES[node], "lost", 1.0)
    assert view.lost == {NAMES[node] for node in silent}


def test_what_dead_nodes_said_last_does_not_count() -> None:
    nodes = views(6)
    for dead in (0, 1):
        nodes[dead].silent(NAMES[2], "lost", 1.0)
        tell(dead, 5, nodes, 1.0)
    assert nodes[5].lost == {NAMES[2]}
    for living in (3, 4):
        for dead in (0, 1):
            nodes[living].silent(NAMES[dead], "lost", 2.0)
        tell(living, 5, nodes, 2.0)
    assert nodes[5].lost == {NAMES[0], NAMES[1]}


@pytest.mark.parametrize("num_nodes", [5, 6])
def test_of_two_halves_that_reported_each_other_both_are_kept(num_nodes: int) -> None:
    nodes = views(num_nodes)
    for one in range(4):
        for other in range(4):
            if one // 2 != other // 2:
                nodes[one].silent(NAMES[other], "lost", 1.0)
    tell(1, 0, nodes, 1.0)
    assert nodes[0].lost == {NAMES[2], NAMES[3]}
    for one in range(4):
        tell(one, 4, nodes, 2.0)
    assert nodes[4].lost == frozenset()


def test_a_node_in_a_new_life_is_believed_at_once_and_its_former_one_no_more() -> None:
    nodes = views(4)
    for at_s in (1.0, 3.0):
        nodes[0].silent(NAMES[1], "lost", at_s)
        nodes[0].heard(NAMES[1], at_s + 1)
    nodes[0].silent(NAMES[1], "lost", 5.0)
    nodes[2].silent(NAMES[1], "lost", 5.0)
    tell(0, 3, nodes, 5.0)
    tell(2, 3, nodes, 5.0)
    assert nodes[3].lost == {NAMES[1]}
    nodes[0] = views(4)[0]
    nodes[0].announce(member(0, incarnation=2), 6.0)
    tell(0, 3, nodes, 6.0)
    assert nodes[3].lost == frozenset()
    nodes[0].silent(NAMES[1], "lost", 7.0)  # Its first word, though it said more before.
    tell(0, 3, nodes, 7.0)
    assert nodes[3].lost == {NAMES[1]}
    nodes[0].announce(member(0, incarnation=3), 8.0)  # It moved, and still cannot reach it.
    tell(0, 3, nodes, 8.0)
    assert nodes[3].lost == {NAMES[1]}


def test_nobody_speaks_in_the_name_of_another_to_that_one_itself() -> None:
    nodes = views(3)
    nodes[1].silent(NAMES[2], "lost", 1.0)
    tell(1, 0, nodes, 1.0)
    forged = MembershipFacts([NodeRecord(node, NAMES[node], (), 0, 0, "") for node in range(3)])
    forged.put(MemberReport(0, 0, 1, 2, 1, 99, True))
    nodes[0].hear(NAMES[1], forged.message(), 1.0)
    assert nodes[0].lost == frozenset()


def test_processes_of_one_node_speak_for_themselves_and_count_as_one() -> None:
    roster = [member(node) for node in range(3)]
    first, second, other, listener = (
        Members(roster, me=NAMES[node], voice=voice)
        for node, voice in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    for at_s in (1.0, 3.0):  # The first one has said more than the second ever will.
        first.silent(NAMES[2], "lost", at_s)
        first.heard(NAMES[2], at_s + 1)
    second.silent(NAMES[2], "lost", 5.0)
    listener.hear(NAMES[0], first.say(), 5.0)
    listener.hear(NAMES[0], second.say(), 5.0)
    assert listener.lost == frozenset()
    first.silent(NAMES[2], "lost", 6.0)
    listener.hear(NAMES[0], first.say(), 6.0)
    assert listener.lost == frozenset()  # Two voices of one node.
    other.silent(NAMES[2], "lost", 6.0)
    listener.hear(NAMES[1], other.say(), 6.0)
    assert listener.lost == {NAMES[2]}
    first.heard(NAMES[2], 9.0)
    listener.hear(NAMES[0], first.say(), 9.0)
    assert listener.lost == {NAMES[2]}  # The second still cannot reach it.
    second.heard(NAMES[2], 9.0)
    listener.hear(NAMES[0], second.say(), 9.0)
    assert listener.lost == frozenset()


def test_a_node_that_is_reported_says_that_it_is_there_and_is_tried_at_once() -> None:
    nodes = views(4)
    nodes[0].silent(NAMES[1], "lost", 2.0)
    tell(0, 2, nodes, 2.1)
    tell(2, 1, nodes, 2.2)
    assert "node 0 (host-0) cannot reach this node" in nodes[1].log[-1]
    tell(1, 2, nodes, 2.3)
    tell(2, 0, nodes, 2.4)
    assert nodes[0].due(2.4) == (NAMES[1],)
    assert NAMES[1] in nodes[0].suspects  # Only an answer clears it.
    nodes[0].silent(NAMES[1], "lost", 2.5)
    before = nodes[1].say()
    tell(0, 1, nodes, 2.6)
    assert nodes[1].say() == before  # The same report is refuted once.


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_node_learns_that_it_was_missed_also_when_that_is_over(is_taken_back: bool) -> None:
    of = views(3)
    of[0].silent(NAMES[2], "lost", 1.0)
    if is_taken_back:
        of[0].heard(NAMES[2], 2.0)
    tell(0, 1, of, 3.0)
    tell(1, 2, of, 3.0)
    assert [view.was_missed for view in of] == [False, False, True]


def test_a_node_that_comes_back_is_taken_in_at_its_new_address() -> None:
    nodes = views(4)
    for reporter in (0, 2, 3):
        nodes[reporter].silent(NAMES[1], "lost", 2.0)
    tell(0, 2, nodes, 2.0)
    assert nodes[2].lost == {NAMES[1]}
    again = member(1, incarnation=2)
    nodes[1] = Members([member(node) for node in range(4)], me=NAMES[1])
    nodes[1].announce(again, 3.0)
    tell(1, 2, nodes, 3.0)
    assert nodes[2].lost == frozenset()
    assert nodes[2].is_usable(NAMES[1], 3.0)
    assert nodes[2].member(NAMES[1]) == again
    tell(2, 0, nodes, 3.0)
    assert nodes[0].member(NAMES[1]).addresses == again.addresses
    tell(3, 2, nodes, 3.0)  # Still about its former life.
    assert nodes[2].lost == frozenset()


def test_a_node_in_a_new_life_says_where_it_is_when_others_speak_of_the_old_one() -> None:
    nodes = views(3)
    nodes[0].silent(NAMES[1], "lost", 2.0)
    again = [member(0), member(1, incarnation=5), member(2)]
    nodes[1] = Members(again, me=NAMES[1])
    assert nodes[1].say() == b""
    tell(0, 1, nodes, 3.0)
    tell(1, 0, nodes, 3.0)
    assert nodes[0].member(NAMES[1]).incarnation == 5
    assert nodes[0].suspects == frozenset()


def test_the_log_tells_it_in_sentences_and_is_bounded() -> None:
    nodes = views(3)
    nodes[0].heard(NAMES[1], 10.0)
    nodes[0].silent(NAMES[1], "lost", 12.0)
    nodes[2].silent(NAMES[1], "lost", 12.0)
    tell(2, 0, nodes, 12.0)
    nodes[0].heard(NAMES[1], 20.0)
    assert nodes[0].log == [
        "node 1 (host-1) did not answer for 2 s; its data comes from the store",
        "node 1 (host-1) was lost after 2 s of silence; its share comes from the store",
        "node 1 (host-1) is back after 8 s",
        "node 1 (host-1) takes part again",
    ]
    for at_s in range(0, 100_000, 100):
        nodes[0].silent(NAMES[1], "lost", at_s)
        nodes[0].heard(NAMES[1], at_s + 50)
    assert len(nodes[0].log) == 64


@pytest.mark.parametrize("wrong", [{"name": ""}, {"node": -1}, {"addresses": 9 * [None]}])
def test_members_refuse_nonsense(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        replace(member(0), **wrong)  # type: ignore[arg-type]


# -- gossip -----------------------------------------------------------------------------------

NODES = 6
numbers = st.integers(0, NODES)  # One too many: facts on nodes that nobody knows.
lives = st.integers(0, 2)
reports = st.builds(
    MemberReport,
    numbers,
    st.integers(0, 1),
    lives,
    numbers,
    lives,
    st.integers(0, 3),
    st.booleans(),
)
records = st.builds(
    lambda node, incarnation, port: NodeRecord(
        node, f"{node:032x}", (("10.0.0.1", port),), 1, incarnation, "h"
    ),
    numbers,
    lives,
    st.integers(0, 2),
)


def merged(*many: list[Fact]) -> MembershipFacts:
    out = MembershipFacts(
        [NodeRecord(node, f"{node:032x}", (), 1, 0, "h") for node in range(NODES)]
    )
    for facts in many:
        for fact in facts:
            out.put(fact)
    return out


def known(facts: MembershipFacts) -> frozenset[Fact]:
    given = [report for by_author in facts._reports.values() for report in by_author.values()]
    return frozenset([*facts._records, *given])


@given(
    facts=st.lists(reports | records, max_size=30),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    seed=st.integers(0, 999),
)
def test_facts_merge_to_the_same_in_any_order_grouping_and_number(
    facts: list[Fact], cuts: tuple[int, int], seed: int
) -> None:
    shuffled = random.Random(seed).sample(facts * 2, len(facts) * 2)
    first, second = sorted(cuts)
    groups = [merged(part) for part in (facts[:first], facts[first:second], facts[second:])]
    messages = [decoded(group.message()) or [] if group.message() else [] for group in groups]
    expected = merged(facts)
    assert known(merged(shuffled)) == known(expected)
    assert known(merged(*messages[::-1])) == known(expected)
    assert [expected.put(fact) for fact in facts] == [False] * len(facts)


@given(
    data=st.binary(max_size=200) | st.lists(reports, max_size=5).map(lambda f: merged(f).message()),
    at=st.integers(0, 200),
    byte=st.integers(0, 255),
)
def test_garbled_gossip_is_ignored(data: bytes, at: int, byte: int) -> None:
    view = views(4)[0]
    garbled = bytearray(data)
    if garbled:
        garbled[at % len(garbled)] = byte
    view.hear(NAMES[1], bytes(garbled), 1.0)
    assert decoded(bytes(garbled)) is not None or view.say() == b""
    assert len(view.say()) <= GOSSIP_BYTES_MAX
    view.silent(NAMES[1], "lost", 2.0)
    assert decoded(view.say()) is not None


@pytest.mark.parametrize("data", [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 4096, b"\x00" * 5000])
def test_gossip_that_is_no_gossip_changes_nothing(data: bytes) -> None:
    view = views(2)[0]
    view.hear(NAMES[1], data, 0.0)
    assert (view.version, view.say()) == (0, b"")


def test_gossip_stays_small_in_the_largest_job_and_still_reaches_everybody() -> None:
    roster = [member(node, incarnation=1_700_000_000_000_000_000) for node in range(4096)]
    speaker = Members(roster, me=NAMES[0])
    listener = Members(roster, me=NAMES[1])
    another = Members(roster, me=NAMES[2])
    dead = range(100, 400)
    for view in (speaker, another):
        for node in dead:
            view.silent(NAMES[node], "lost", 1.0)
    for _ in range(20):
        for view in (speaker, another):
            message = view.say()
            assert len(message) <= GOSSIP_BYTES_MAX
            listener.hear(NAMES[0], message, 1.0)
    assert listener.lost == {NAMES[node] for node in dead}


def test_of_many_reports_on_one_node_a_few_are_kept_and_each_view_has_its_own() -> None:
    nodes = views(200)
    for reporter in range(1, 200):
        nodes[reporter].silent(NAMES[0], "lost", 1.0)
        tell(reporter, (reporter + 1) % 200, nodes, 1.0)
    assert all(view.lost == {NAMES[0]} for view in nodes[2:])
    assert len(decoded(nodes[199].say()) or []) <= 64


# -- all views come to agree ------------------------------------------------------------------


class Job:
    """Nodes that live and die, links that break, and messages that are lost, late or doubled.

    Every node has processes with a view each; the first of them serves.
    """

    def __init__(self, num_nodes: int, num_voices: int) -> None:
        self.num_nodes = num_nodes
        self.lives = [0] * num_nodes
        self.is_dead = [False] * num_nodes
        self.is_cut: set[tuple[int, int]] = set()
        self.said: list[tuple[int, bytes]] = []
        self.now_s = 0.0
        self.views = [[Members(self.roster(), me=NAMES[0])] * num_voices] * num_nodes
        for node in range(num_nodes):
            self.start(node)

    def roster(self) -> list[Member]:
        return [member(node) for node in range(self.num_nodes)]

    def start(self, node: int) -> None:
        self.is_dead[node] = False
        self.lives[node] += 1
        mine = member(node, self.lives[node])
        roster = [*self.roster()[:node], mine, *self.roster()[node + 1 :]]
        self.views[node] = [
            Members(roster, me=mine.name, voice=voice) for voice in range(len(self.views[node]))
        ]
        if self.lives[node] > 1:
            self.views[node][0].announce(mine, self.now_s)

    def hear(self, listener: Members, speaker: int, voice: int) -> None:
        self.said.append((speaker, self.views[speaker][voice].say()))
        listener.hear(NAMES[speaker], self.said[-1][1], self.now_s)

    def ask(self, asker: tuple[int, int], asked: int, *, lose: str = "") -> None:
        node, voice = asker
        if node == asked or self.is_dead[node]:
            return
        view, server = self.views[node][voice], self.views[asked][0]
        if not self.is_dead[asked] and (node, asked) not in self.is_cut:
            self.hear(server, node, voice)
            if not lose:
                self.hear(view, asked, 0)
                view.heard(NAMES[asked], self.now_s)
                return
        view.silent(NAMES[asked], lose or "lost", self.now_s)


@given(data=st.data(), num_nodes=st.integers(2, 8), num_voices=st.integers(1, 2))
def test_when_faults_end_all_views_agree_with_the_truth(
    data: st.DataObject, num_nodes: int, num_voices: int
) -> None:
    job = Job(num_nodes, num_voices)
    nodes, voices = st.integers(0, num_nodes - 1), st.integers(0, num_voices - 1)
    kinds = st.sampled_from(["lost", "refused", "stuck", "broken"])
    for _ in range(data.draw(st.integers(0, 60))):
        job.now_s += data.draw(st.sampled_from([0.0, 0.5, 40.0]))
        one, voice, other = data.draw(nodes), data.draw(voices), data.draw(nodes)
        match data.draw(st.integers(0, 7)):
            case 0:
                job.is_dead[one] = True
            case 1 if job.is_dead[one]:
                job.start(one)
            case 2:
                job.is_cut.add((one, other))
            case 3:
                job.is_cut.discard((one, other))
            case 4 if job.said and not job.is_dead[other]:  # Late, doubled, or another way.
                speaker, message = data.draw(st.sampled_from(job.said))
                job.views[other][voice].hear(NAMES[speaker], message, job.now_s)
            case 5:
                job.ask((one, voice), other, lose=data.draw(kinds))
            case _:
                job.ask((one, voice), other)
    job.is_cut.clear()
    processes = list(product(range(num_nodes), range(num_voices)))
    for _ in range(4):
        job.now_s += 1000.0
        for process, other in product(processes, range(num_nodes)):
            job.ask(process, other)
    dead = {NAMES[node] for node in range(num_nodes) if job.is_dead[node]}
    records = {n: member(n, job.lives[n]) for n in range(num_nodes) if not job.is_dead[n]}
    for view in [view for node in records for view in job.views[node]]:
        assert (view.lost, view.suspects) == (dead, dead)
        assert {n: view.member(NAMES[n]) for n in records} == records
