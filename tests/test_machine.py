"""Machines: what is written is what is read, and nonsense is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.machine import (
    Curve,
    LinkModel,
    Machine,
    StoreModel,
    TierModel,
    load_machine,
    machine_toml,
)

RATES = st.floats(1.0, 1e13)
LATENCIES = st.floats(0.0, 100.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    counts = sorted(draw(st.sets(st.integers(1, 2**20), min_size=1, max_size=5)))
    return Curve(counts=tuple(counts), bytes_s=tuple(draw(RATES) for _ in counts))


TIERS = st.builds(
    TierModel,
    kind=st.sampled_from(["memory", "disk"]),
    capacity_bytes=st.integers(0, 2**60),
    read=curves(),
    write=curves(),
    latency_s=LATENCIES,
    request_bytes=st.none() | st.integers(1, 10**9),
)
STORES = st.builds(
    StoreModel,
    latency_s=LATENCIES,
    latency_p99_s=LATENCIES,
    throughput=curves(),
    shared=st.none() | curves(),
    requests_s_max=st.none() | RATES,
    request_bytes=st.none() | st.integers(1, 10**9),
)
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
MACHINES = st.builds(
    Machine,
    store=STORES,
    link=st.builds(LinkModel, bytes_s=RATES, latency_s=LATENCIES),
    tiers=st.lists(TIERS, max_size=3).map(tuple),
    cores=st.integers(1, 1_000),
    copy=curves(),
    decode=st.none() | curves(),
    notes=st.dictionaries(WORDS, WORDS, max_size=3),
)
PLAIN = Machine(
    store=StoreModel(latency_s=0.02, latency_p99_s=0.1, throughput=Curve.flat(100e6)),
    link=LinkModel(bytes_s=1e9),
)


@given(machine=MACHINES)
def test_a_machine_survives_its_file(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "machine.toml"
    path.write_text(machine_toml(machine), encoding="utf-8")
    assert load_machine(path) == machine


def test_a_file_may_say_no_more_than_it_must(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(
        """
        [store]
        latency_s = 0.02
        latency_p99_s = 0.1
        throughput = {counts = [1], bytes_s = [1e8]}
        [link]
        bytes_s = 1000000000
        """
    )
    assert load_machine(path) == PLAIN


@given(curve=curves(), count=st.floats(0.5, 2**21))
def test_a_curve_stays_between_its_points_and_is_flat_beyond(curve: Curve, count: float) -> None:
    at = curve.at(count)
    assert min(curve.bytes_s) * (1 - 1e-9) <= at <= max(curve.bytes_s) * (1 + 1e-9)
    for point, rate in zip(curve.counts, curve.bytes_s, strict=True):
        assert curve.at(point) == pytest.approx(rate)
    assert curve.at(0.1) == curve.bytes_s[0]
    assert curve.at(2**30) == curve.bytes_s[-1]


def test_between_two_points_lies_a_straight_line() -> None:
    curve = Curve(counts=(2, 6), bytes_s=(100.0, 500.0))
    assert [curve.at(c) for c in (1, 2, 3, 4.5, 6, 7)] == [100, 100, 200, 350, 500, 500]


@pytest.mark.parametrize(
    ("counts", "rates"),
    [((), ()), ((1, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1,), (1.0, 2.0)), ((0,), (1.0,))],
)
def test_curves_that_are_none_are_refused(
    counts: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    with pytest.raises(OptionError):
        Curve(counts=counts, bytes_s=rates)


def test_rates_of_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="above 0"):
        Curve.flat(0.0)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("store = 3", "store"),
        ("[store\n", "machine.toml"),
        ("[link]\nbytes_s = 1e9\n", "store"),
        (machine_toml(PLAIN).replace("[1]", "[0]"), "above 0"),
        (machine_toml(PLAIN).replace("0.02", "-0.02"), "0.02"),
        (machine_toml(PLAIN).replace("cores = 1", 'cores = "many"'), "cores"),
    ],
)
def test_a_file_that_is_no_machine_says_why(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match="penstock probe") as caught:
        load_machine(path)
    assert hint in str(caught.value)


def test_a_file_that_is_not_there_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot be read.*penstock probe"):
        load_machine(tmp_path / "none.toml")


@given(store=STORES, size=st.integers(1, 10**9), count=st.integers(1, 1_000))
def test_more_in_flight_never_shortens_a_single_read(
    store: StoreModel, size: int, count: int
) -> None:
    alone_s = store.read_s(size, 1)
    assert store.read_s(size, count) >= alone_s * (1 - 1e-9)
    assert store.read_s(2 * size, count) >= store.read_s(size, count)


def test_reading_as_it_was_measured_takes_as_long_as_it_did() -> None:
    curve = Curve(counts=(1, 8, 64), bytes_s=(2.5e6, 20e6, 40e6))
    store = StoreModel(latency_s=0.03, latency_p99_s=0.1, throughput=curve, request_bytes=100_000)
    for count in (1, 8, 64):
        rate = count * 100_000 / store.read_s(100_000, count)
        assert rate == pytest.approx(curve.at(count), rel=1e-6)
