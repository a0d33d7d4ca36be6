"""Tiers of very many units: nothing is kept for each, and everything else is as ever."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.storage.conftest import fill, unit_bytes, units_of

from penstock.storage.tier import Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_places import NOWHERE
from penstock.storage.tier_shape import ComputedShape, Ints, TierShape
from penstock.storage.tier_sizes import Disk, Memory
from penstock.testing.forks import in_child

SPAN, UNIT, EVERY = 65536, 16384, 20480


class Even:
    """Numbers of a row: a column that is computed."""

    def __init__(self, count: int, step: int, base: int = 0) -> None:
        self._count, self._step, self._base = count, step, base

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, units: Ints | int) -> Ints | int:  # type: ignore[override]
        return self._base + self._step * units


def shape_with(count: int) -> TierShape:
    """Units of 16 KiB with holes of 4 KiB between."""
    return TierShape(
        name="many",
        offsets=Even(count, EVERY),  # type: ignore[arg-type]
        lengths=Even(count, 0, UNIT),  # type: ignore[arg-type]
        known=ComputedShape(size_bytes=count * EVERY, digest=7),
    )


SHAPE = shape_with(256)


def placed(tiers: Tiers, *spans: int) -> list[int]:
    chosen = np.zeros(SHAPE.size_bytes // SPAN + 1, np.bool_)
    chosen[list(spans)] = True
    tiers.place(SPAN, chosen)
    return np.flatnonzero(tiers.tier_of(units_of(tiers)) != NOWHERE).tolist()


def test_a_node_alone_fills_the_first_bytes_of_the_layout(tmp_path: Path) -> None:
    wishes = [Memory(10 * EVERY + 100, folder=tmp_path), Disk(tmp_path, 20 * EVERY)]
    with open_tiers(wishes, SHAPE) as tiers:
        owners = tiers.tier_of(units_of(tiers))
        # the eleventh lies across the edge and belongs to nobody
        assert owners.tolist() == [0] * 10 + [NOWHERE] + [1] * 19 + [NOWHERE] * 226
        assert len(fill(tiers)) == 29
        assert all(bytes(tiers.tiers[1].read(u)) == unit_bytes(u, UNIT) for u in range(11, 30))
        assert tiers.placed_bytes == 30 * EVERY + 100
        assert tiers.present_bytes >= 29 * UNIT
    with open_tiers(wishes, SHAPE) as tiers:
        assert tiers.settle(np.arange(11, 30)).all()


def test_spans_are_placed_whole_and_the_fastest_tier_first(tmp_path: Path) -> None:
    wishes = [Memory(2 * SPAN, folder=tmp_path), Disk(tmp_path, 2 * SPAN)]
    with open_tiers(wishes, SHAPE, placed=False) as tiers:
        assert placed(tiers, 3, 5, 9) == [10, 11, 12, 16, 17, 18, 19, 29, 30, 31]
        assert tiers.tier_of(np.array([10, 16, 29])).tolist() == [0, 0, 1]
        before = tiers.tier_of(units_of(tiers))
        placed(tiers, 0, 1, 3, 5, 9)  # one of the new ones has room
        after = tiers.tier_of(units_of(tiers))
        assert (after[before != NOWHERE] == before[before != NOWHERE]).all()
        assert tiers.tier_of(np.array([0, 4])).tolist() == [1, NOWHERE]
        assert tiers.capacity_bytes == 4 * SPAN


def test_what_is_spare_makes_way_and_the_capacity_is_obeyed(tmp_path: Path) -> None:
    wish = Disk(tmp_path, 8 * SPAN)
    with open_tiers([wish], SHAPE, placed=False) as tiers:
        first = placed(tiers, *range(8))
        assert fill(tiers) == first
    with open_tiers([wish], SHAPE, placed=False) as tiers:
        second = placed(tiers, *range(4, 12))
        kept = sorted(set(first) & set(second))
        assert fill(tiers) == sorted(set(second) - set(first))
        assert tiers.held(np.array(kept)).all()
        # only what had to go has gone: what is there fills the capacity
        assert tiers.present(units_of(tiers)).sum() == 8 * SPAN // UNIT > len(second)
        assert tiers.tiers[0].fill_bytes == 8 * SPAN


def test_a_tier_never_becomes_larger_than_it_was_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.storage import tier as tier_module

    monkeypatch.setattr(tier_module, "_ROUNDED_BYTES", 0)
    with open_tiers([Disk(tmp_path, 8 * SPAN)], SHAPE, placed=False) as tiers:
        units = placed(tiers, *range(8))
        files = tiers.tiers[0].files  # as if there were no holes to count on
        files.write_header(replace(files.header, promised_bytes=0))
        tiers.tiers[0].capacity_bytes = 5 * UNIT
        assert fill(tiers, units) == units[:5]


def test_a_hundred_million_units_take_no_memory_in_a_process(tmp_path: Path) -> None:
    count = 10**8  # the states lie in a file of that many bytes
    shape = shape_with(count)

    def child() -> tuple[int, list[bool]]:
        tracemalloc.start()
        with open_tiers([Disk(tmp_path, "1MB")], shape, placed=False) as tiers:
            spans = np.zeros(2**18 + 1, np.bool_)
            spans[::1000] = True
            tiers.place(2**24, spans)
            units = np.array([0, 1, count - 1])
            _, peak_bytes = tracemalloc.get_traced_memory()
            return peak_bytes, (tiers.tier_of(units) != NOWHERE).tolist()

    peak_bytes, _ = in_child(child)
    assert peak_bytes < 20 * 2**20
