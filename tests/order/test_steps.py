"""What a step trains on depends on neither the world nor on interruptions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import GlobalOrder, MixtureOrder, Order, Steps, StreamHash

WORLDS = (1, 2, 3, 4, 8)


@st.composite
def all_steps(draw: st.DrawFn) -> Steps:
    num_samples = draw(st.integers(1, 100))
    drop_last = draw(st.booleans())
    global_batch_size = draw(st.integers(1, num_samples if drop_last else 150))
    return Steps(
        num_samples=num_samples,
        global_batch_size=global_batch_size,
        num_ranks=draw(st.integers(1, min(global_batch_size, 9))),
        drop_last=drop_last,
        start=draw(st.integers(0, num_samples)),
    )


def hash_of(order: Order, steps: Steps, epoch: int) -> StreamHash:
    """Return the hash of what all ranks are given, last rank first."""
    total = StreamHash()
    all_ids = order.ids(epoch, 0, order.num_samples)
    for rank in reversed(range(steps.num_ranks)):
        for step in range(steps.num_steps):
            positions, mask = steps.positions(step, rank)
            part = StreamHash().update(epoch, positions, all_ids[positions], mask)
            total = total.merge(part)
    return total


@given(steps=all_steps())
def test_shares_of_all_ranks_make_up_the_global_batch(steps: Steps) -> None:
    shares = [steps.share(rank) for rank in range(steps.num_ranks)]
    assert shares[0][0] == 0
    assert shares[-1][1] == steps.global_batch_size
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = {stop - start for start, stop in shares}
    assert max(sizes) - min(sizes) <= (steps.global_batch_size % steps.num_ranks != 0)


@given(steps=all_steps())
def test_unmasked_positions_are_what_is_left_of_the_epoch_in_order(steps: Steps) -> None:
    seen: list[int] = []
    for step in range(steps.num_steps):
        parts = [steps.positions(step, rank) for rank in range(steps.num_ranks)]
        kept = [positions[mask] for positions, mask in parts]
        assert np.concatenate(kept).tolist() == list(range(*steps.bounds(step)))
        seen += np.concatenate(kept).tolist()
    left = steps.num_samples - steps.start
    whole = left - left % steps.global_batch_size if steps.drop_last else left
    assert seen == list(range(steps.start, steps.start + whole))


@given(steps=all_steps())
def test_padding_wraps_to_the_beginning_of_the_epoch(steps: Steps) -> None:
    for step in range(steps.num_steps):
        parts = [steps.positions(step, rank) for rank in range(steps.num_ranks)]
        positions = np.concatenate([part[0] for part in parts])
        mask = np.concatenate([part[1] for part in parts])
        assert len(positions) == steps.global_batch_size
        num_padded = int((~mask).sum())
        assert positions[~mask].tolist() == [i % steps.num_samples for i in range(num_padded)]
        assert num_padded == 0 or step == steps.num_steps - 1


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_stream_hash_is_the_same_on_any_world(drop_last: bool) -> None:
    order = GlobalOrder(num_samples=101, seed=7)
    size = {"num_samples": 101, "global_batch_size": 12, "drop_last": drop_last}
    digests = {hash_of(order, Steps(num_ranks=n, **size), 3).hexdigest() for n in WORLDS}
    assert len(digests) == 1


@given(
    num_samples=st.integers(1, 25),
    sizes=st.tuples(st.integers(1, 12), st.integers(8, 12)),
    num_ranks=st.sampled_from(WORLDS),
)
def test_resuming_at_every_position_gives_the_same_stream(
    num_samples: int, sizes: tuple[int, int], num_ranks: int
) -> None:
    order = MixtureOrder(sizes=(5, 9), weights=(1, 2), seed=7, num_samples=num_samples, period=4)
    whole = hash_of(order, Steps(num_samples=num_samples, global_batch_size=sizes[0]), 1)
    for start in range(num_samples + 1):
        before = StreamHash().update(1, np.arange(start), order.ids(1, 0, start))
        resumed = Steps(
            num_samples=num_samples, global_batch_size=sizes[1], num_ranks=num_ranks, start=start
        )
        assert before.merge(hash_of(order, resumed, 1)) == whole


@given(steps=all_steps(), data=st.data())
def test_a_run_that_stops_after_any_step_goes_on_with_the_same_batches(
    steps: Steps, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, steps.num_steps))
    resumed = Steps(
        num_samples=steps.num_samples,
        global_batch_size=steps.global_batch_size,
        drop_last=steps.drop_last,
        start=steps.position_after(done),
    )
    rest = [steps.bounds(step) for step in range(done, steps.num_steps)]
    assert [resumed.bounds(step) for step in range(resumed.num_steps)] == rest


@given(data=st.data())
def test_the_hash_does_not_depend_on_how_the_stream_is_cut(data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=40)))
    cut = data.draw(st.integers(0, len(ids)))
    places = np.arange(len(ids))
    whole = StreamHash().update(2, places, ids)
    second = StreamHash().update(2, places[cut:], ids[cut:])
    assert second.update(2, places[:cut], ids[:cut]) == whole


def test_the_hash_sees_swaps_losses_repeats_and_other_epochs() -> None:
    streams = [
        StreamHash(),
        StreamHash().update(0, [0, 1, 2], [5, 6, 7]),
        StreamHash().update(0, [0, 1, 2], [6, 5, 7]),
        StreamHash().update(0, [0, 1], [5, 6]),
        StreamHash().update(0, [0, 1, 2, 2], [5, 6, 7, 7]),
        StreamHash().update(1, [0, 1, 2], [5, 6, 7]),
        StreamHash().update(0, [1, 2, 3], [5, 6, 7]),
    ]
    assert len({part.hexdigest() for part in streams}) == len(streams)


def test_the_hash_is_pinned_by_value() -> None:
    assert StreamHash().hexdigest() == "cf00ff61eb9b6fe1"
    assert (
        StreamHash().update(3, np.arange(100), np.arange(100) * 7).hexdigest() == "e323330b86687c4d"
    )
    with pytest.raises(OptionError, match="3 positions for 2"):
        StreamHash().update(0, [0, 1, 2], [5, 6])


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="at least 1 sample"):
        Steps(num_samples=10, global_batch_size=2, num_ranks=3)
    with pytest.raises(OptionError, match="position 11"):
        Steps(num_samples=10, global_batch_size=2, start=11)
    with pytest.raises(OptionError, match="no complete global batch"):
        Steps(num_samples=10, global_batch_size=11, drop_last=True)
    steps = Steps(num_samples=10, global_batch_size=4, num_ranks=2)
    assert steps.steps_per_epoch == 3
    with pytest.raises(OptionError, match="3 steps"):
        steps.positions(3, 0)
    with pytest.raises(OptionError, match="2 ranks"):
        steps.positions(0, 2)
    with pytest.raises(OptionError, match="4 cannot be done"):
        steps.position_after(4)
