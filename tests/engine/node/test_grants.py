"""Grants: what is in use stays, no place and no limit is exceeded, the oldest goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.node.grants import (
    DatasetKey,
    GrantDecision,
    GrantLimits,
    GrantPlace,
    GrantRequest,
    TakenSpace,
    decide,
)

ROOMS = (
    GrantPlace(kind="memory", capacity_bytes=100),
    GrantPlace(kind="disk", capacity_bytes=1000),
)
NEW = DatasetKey("u1", "new")


def taken(name: str, memory: int, disk: int, *, at: float = 0, is_open: bool = False) -> TakenSpace:
    owner, _, dataset = name.partition("/")
    return TakenSpace(
        key=DatasetKey(owner, dataset), size_bytes=(memory, disk), is_open=is_open, used_at_s=at
    )


def wanted(size_bytes: int, **more: object) -> GrantRequest:
    return GrantRequest(key=NEW, size_bytes=size_bytes, **more)  # type: ignore[arg-type]


def test_the_fastest_place_is_filled_first() -> None:
    assert decide(ROOMS, [], wanted(300), GrantLimits()).granted_bytes == (100, 200)


def test_what_was_wished_for_by_kind_is_not_exceeded() -> None:
    wished = {"memory": 30}
    decision = decide(ROOMS, [], wanted(300, wished_bytes=wished), GrantLimits())
    assert (decision.granted_bytes, decision.bound) == ((30, 0), "what the job wished for")


def test_the_longest_unused_goes_first_and_only_where_room_is_needed() -> None:
    others = [
        taken("u2/young", 40, 300, at=9),
        taken("u2/old", 40, 300, at=1),
        taken("u2/open", 10, 300, at=0, is_open=True),
    ]
    decision = decide(ROOMS, others, wanted(50), GrantLimits())
    assert decision == GrantDecision(granted_bytes=(50, 0), drops=((DatasetKey("u2", "old"), 0),))


def test_a_user_at_his_limit_loses_his_own_idle_sets_and_no_one_elses() -> None:
    others = [taken("u2/old", 0, 500, at=0), taken("u1/mine", 0, 100, at=5)]
    decision = decide(ROOMS, others, wanted(150), GrantLimits(owner_bytes=150))
    assert decision.drops == ((DatasetKey("u1", "mine"), 1),)
    assert sum(decision.granted_bytes) == 150


sizes = st.integers(0, 1200)
any_taken = st.builds(
    lambda owner, name, memory, disk, at, is_open: taken(
        f"u{owner}/{name}", memory, disk, at=at, is_open=is_open
    ),
    st.integers(1, 3), st.integers(0, 99), st.integers(0, 40), st.integers(0, 300),
    st.floats(0, 9), st.booleans(),
)  # fmt: skip


@given(
    others=st.lists(any_taken, max_size=6, unique_by=lambda one: one.key),
    size_bytes=sizes,
    limit=st.none() | sizes,
    owner_limit=st.none() | sizes,
    slack=st.integers(0, 50),
)
def test_no_bound_is_exceeded_and_nothing_in_use_is_dropped(
    others: list[TakenSpace],
    size_bytes: int,
    limit: int | None,
    owner_limit: int | None,
    slack: int,
) -> None:
    limits = GrantLimits(dataset_bytes=limit, owner_bytes=owner_limit)
    decision = decide(ROOMS, others, wanted(size_bytes, slack_bytes=slack), limits)
    granted = sum(decision.granted_bytes)
    assert granted <= size_bytes + (slack if all(decision.granted_bytes) else 0)
    assert limit is None or granted <= limit
    used = {one.key for one in others if one.is_open}
    assert not used & {key for key, _ in decision.drops}
    assert len(set(decision.drops)) == len(decision.drops)
    left = {
        (one.key, place): 0 if (one.key, place) in decision.drops else size
        for one in others
        for place, size in enumerate(one.size_bytes)
    }
    for place, grant_place in enumerate(ROOMS):
        beside = sum(size for (_, where), size in left.items() if where == place)
        here = decision.granted_bytes[place]
        assert here == 0 or beside + here <= grant_place.capacity_bytes
    if owner_limit is not None:
        own = sum(size for (key, _), size in left.items() if key.owner == NEW.owner)
        assert granted == 0 or own + granted <= owner_limit
    assert granted >= size_bytes or decision.bound
