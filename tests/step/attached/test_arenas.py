"""Arenas: every element of every parameter lies in one slice of one unit, and slices are even."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.step.attached.arenas import ALIGN_ELEMENTS, Arena, laid_out

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, num_parts=st.integers(1, 5), unit_length=st.integers(1, 3000))
def test_slices_are_even_and_cover_everything_once(
    lengths: list[int], num_parts: int, unit_length: int
) -> None:
    layout = laid_out(lengths, num_parts=num_parts, unit_length=unit_length)
    at = 0
    for unit in layout.units:
        assert unit.start == at
        assert (unit.stop - unit.start) % (num_parts * ALIGN_ELEMENTS) == 0
        assert unit.params
        at = unit.stop
    seen = torch.zeros(layout.length, dtype=torch.int64)
    for unit in layout.units:
        for rank in range(num_parts):
            for param, start, stop in layout.segments(unit, rank):
                assert layout.starts[param] <= start < stop <= layout.starts[param] + lengths[param]
                seen[start:stop] += 1
    assert int(seen.sum()) == sum(lengths)
    assert not (seen > 1).any()


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, num_parts=st.integers(1, 5))
def test_units_are_about_as_long_as_wanted(lengths: list[int], num_parts: int) -> None:
    wanted = 1000
    layout = laid_out(lengths, num_parts=num_parts, unit_length=wanted)
    quantum = num_parts * ALIGN_ELEMENTS
    assert all(unit.stop - unit.start <= 1.5 * wanted + quantum for unit in layout.units)
    # Two neighbours that would fit together are together.
    for one, other in pairwise(layout.units):
        assert other.stop - one.start > wanted


def test_parameters_are_views_with_their_values_and_their_order_in_memory() -> None:
    torch.manual_seed(0)
    params = [
        torch.randn(3, 5),
        torch.randn(()),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(4, 8)[:, ::2],
    ]
    before = [param.clone() for param in params]
    lengths = [param.numel() for param in params]
    arena = Arena(params, laid_out(lengths, num_parts=3, unit_length=64))
    arena.move_in(params)
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert param.untyped_storage().data_ptr() == arena.data.untyped_storage().data_ptr()
    assert params[2].is_contiguous(memory_format=torch.channels_last)
    arena.data.zero_()
    assert not any(param.any() for param in params)


def test_a_changed_gradient_shows_in_its_own_counter_only() -> None:
    params = [torch.randn(4), torch.randn(4)]
    arena = Arena(params, laid_out([4, 4], num_parts=1, unit_length=64))
    first, second = arena.grad_views
    versions = first._version, second._version
    first.add_(1)
    assert (first._version, second._version) == (versions[0] + 1, versions[1])
