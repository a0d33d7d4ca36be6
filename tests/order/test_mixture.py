"""A mixture keeps its proportions at every period edge, and each source its own epochs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import MixtureOrder, interleave_of, shares_of

shares_lists = st.lists(st.integers(1, 60), min_size=1, max_size=9).map(tuple)


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    num_sources = draw(st.integers(1, 4))
    pick = st.lists(st.integers(1, 30), min_size=num_sources, max_size=num_sources)
    return MixtureOrder(
        sizes=tuple(draw(pick)),
        weights=tuple(draw(pick)),
        seed=draw(st.integers(0, 2**64 - 1)),
        num_samples=draw(st.integers(0, 120)),
        period=draw(st.integers(1, 40)),
    )


def stream(order: MixtureOrder, num_epochs: int) -> list[int]:
    epochs = [order.ids(epoch, 0, order.num_samples) for epoch in range(num_epochs)]
    return np.concatenate(epochs).tolist()  # type: ignore[no-any-return]


def sources_of(order: MixtureOrder, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.searchsorted(order.offsets, ids, side="right") - 1


@given(shares=shares_lists)
def test_any_prefix_is_within_tijdemans_bound_of_the_weights(shares: tuple[int, ...]) -> None:
    total = sum(shares)
    sources, _ = interleave_of(shares).draws_at(np.arange(2 * total))
    bound = 1 - Fraction(1, max(2 * len(shares) - 2, 2))
    for source, share in enumerate(shares):
        counts = np.cumsum(sources == source)
        for length, count in enumerate(counts.tolist(), start=1):
            assert abs(count - Fraction(length * share, total)) <= bound


@given(shares=shares_lists)
def test_slots_and_draws_undo_each_other(shares: tuple[int, ...]) -> None:
    interleave = interleave_of(shares)
    slots = np.arange(3 * interleave.total)
    sources, draws = interleave.draws_at(slots)
    for source in range(len(shares)):
        mine = slots[sources == source]
        assert draws[mine].tolist() == list(range(len(mine)))
        assert np.array_equal(interleave.slots_at(source, draws[mine]), mine)
        for slot in range(0, 3 * interleave.total, 7):
            assert interleave.num_draws(source, slot) == np.count_nonzero(mine < slot)


@given(order=mixtures())
def test_every_period_edge_has_each_source_within_one_of_its_weight(order: MixtureOrder) -> None:
    for epoch in range(3):
        sources = sources_of(order, order.ids(epoch, 0, order.num_samples))
        for source, share in enumerate(order.shares):
            before = interleave_of(order.shares).num_draws(source, epoch * order.num_samples)
            for edge in [*range(0, order.num_samples, order.period), order.num_samples]:
                count = before + np.count_nonzero(sources[:edge] == source)
                slots = epoch * order.num_samples + edge
                assert abs(count - Fraction(slots * share, sum(order.shares))) < 1


@given(order=mixtures())
def test_a_source_repeats_only_after_all_of_it_was_used(order: MixtureOrder) -> None:
    ids = np.array(stream(order, 4))
    sources = sources_of(order, ids)
    slack = order.period  # inside a period slots are shuffled, so a round may end within one
    for source, size in enumerate(order.sizes):
        mine = ids[sources == source]
        for first in range(0, len(mine) - size + 1, size):
            run = mine[max(first - slack, 0) : first + size + slack]
            assert len(set(run.tolist())) == size


@given(order=mixtures())
def test_use_counts_of_a_source_differ_by_at_most_one(order: MixtureOrder) -> None:
    uses = np.bincount(stream(order, 3), minlength=sum(order.sizes))
    for first, end in zip(order.offsets[:-1], order.offsets[1:], strict=True):
        assert int(np.ptp(uses[first:end])) <= 1


@given(order=mixtures(), epoch=st.integers(0, 5))
def test_positions_are_the_first_use_or_minus_one(order: MixtureOrder, epoch: int) -> None:
    first: dict[int, int] = {}
    for position, sample_id in enumerate(order.ids(epoch, 0, order.num_samples).tolist()):
        first.setdefault(sample_id, position)
    ids = np.arange(sum(order.sizes))
    assert order.positions(epoch, ids).tolist() == [first.get(i, -1) for i in ids.tolist()]


@given(order=mixtures(), epoch=st.integers(0, 5), data=st.data())
def test_any_range_of_a_mixture_can_be_sought(
    order: MixtureOrder, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, order.num_samples))
    stop = data.draw(st.integers(start, order.num_samples))
    whole = order.ids(epoch, 0, order.num_samples)
    assert np.array_equal(order.ids(epoch, start, stop), whole[start:stop])


def test_sources_do_not_alternate_in_a_fixed_pattern() -> None:
    order = MixtureOrder(sizes=(1000, 1000), weights=(1, 1), seed=7, period=16)
    rows = sources_of(order, order.ids(0, 0, 1600)).reshape(100, 16)
    assert (rows.sum(axis=1) == 8).all()
    assert len({tuple(row) for row in rows}) > 95


def test_a_whole_epoch_of_natural_weights_uses_every_sample_once() -> None:
    order = MixtureOrder(sizes=(30, 70, 100), weights=(30, 70, 100), seed=7, period=25)
    assert sorted(stream(order, 1)) == list(range(200))


def test_a_source_of_weight_0_changes_nothing_for_the_others() -> None:
    with_it, without = interleave_of(shares_of((0.3, 0, 0.7))), interleave_of(shares_of((0.3, 0.7)))
    assert with_it.source_at.tolist() == [2 * source for source in without.source_at.tolist()]
    order = MixtureOrder(sizes=(5, 5, 5), weights=(1, 0, 1), seed=7)
    ids = np.concatenate([order.ids(epoch, 0, 15) for epoch in range(3)])
    assert not ((ids >= 5) & (ids < 10)).any()
    assert order.positions(1, [4, 5, 9]).tolist()[1:] == [-1, -1]


def test_weights_are_taken_as_written() -> None:
    assert shares_of((0.7, 0.2, 0.1)) == (7, 2, 1)
    assert shares_of((70, 20, 10)) == (7, 2, 1)
    rounded = shares_of((1.0, 2**0.5, 3**0.5))
    assert sum(rounded) == 65_536
    assert np.allclose(
        np.array(rounded) / 65_536, np.array([1, 2**0.5, 3**0.5]) / 4.146264, atol=1e-5
    )


def test_nonsense_is_refused_at_birth() -> None:
    with pytest.raises(OptionError, match="for each source"):
        MixtureOrder(sizes=(5, 5), weights=(1,), seed=7)
    with pytest.raises(OptionError, match="positive"):
        MixtureOrder(sizes=(5, 5), weights=(0, 0), seed=7)
    with pytest.raises(OptionError, match="from 0 on, got -1"):
        MixtureOrder(sizes=(5, 5), weights=(1, -1), seed=7)
    with pytest.raises(OptionError, match="less than 1/65536"):
        MixtureOrder(sizes=(5, 5), weights=(1, 1e-7), seed=7)
    with pytest.raises(OptionError, match="period"):
        MixtureOrder(sizes=(5, 5), weights=(1, 1), seed=7, period=0)
    with pytest.raises(OptionError, match="size of at least 1"):
        MixtureOrder(sizes=(5, 0), weights=(1, 1), seed=7)
