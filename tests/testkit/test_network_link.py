from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.network import Link, Network
from testkit.network_link import Wire, bits_of

from penstock.errors import OptionError

FRAMES = st.lists(st.tuples(st.floats(0, 0.01), st.integers(60, 65_536)), min_size=1, max_size=50)


@given(frames=FRAMES, jitter_s=st.sampled_from([0.0, 0.002]))
def test_a_wire_is_never_faster_than_its_rate_and_keeps_the_order(
    frames: list[tuple[float, int]], jitter_s: float
) -> None:
    link = Link(rate="100mbit", delay_s=0.001, jitter_s=jitter_s)
    wire = Wire(link, random.Random(7))
    now_s = sent_bytes = last_s = 0.0
    for gap_s, size_bytes in frames:
        now_s += gap_s
        sent_bytes += size_bytes
        arrival_s = wire.arrival_s(now_s, size_bytes)
        assert arrival_s is not None
        assert arrival_s >= max(last_s, now_s + size_bytes / link.bytes_s + 0.001)
        assert arrival_s >= frames[0][0] + sent_bytes / link.bytes_s - 1e-12
        last_s = arrival_s


def test_a_wire_loses_about_its_share_and_all_when_it_is_cut() -> None:
    wire = Wire(Link(loss=0.1), random.Random(7))
    lost = sum(wire.arrival_s(float(k), 1000) is None for k in range(10_000))
    assert 800 < lost < 1200
    wire.is_cut = True
    assert wire.arrival_s(1e6, 1000) is None


def test_a_full_queue_drops_and_an_empty_one_takes_again() -> None:
    wire = Wire(Link(rate="8mbit"), random.Random(7))
    taken = [wire.arrival_s(0.0, 10_000, queue_s=0.03) for _ in range(6)]
    assert [at is not None for at in taken] == [True] * 4 + [False] * 2
    assert wire.arrival_s(1.0, 10_000, queue_s=0.03) == pytest.approx(1.01)


def test_nonsense_is_refused() -> None:
    assert bits_of("0.5gbit") == 5e8
    for wrong in ("1", "1gb", "0mbit", "-1mbit", ""):
        with pytest.raises(OptionError, match="is not a rate"):
            Link(rate=wrong)
    for values in ({"delay_s": -1.0}, {"jitter_s": math.inf}, {"loss": 1.5}):
        with pytest.raises(OptionError, match="must"):
            Link(**values)
    with pytest.raises(OptionError, match="no host's name"):
        Network({"a b": Link()})
    with pytest.raises(OptionError, match="got 0"):
        Network({})
