"""Virtual time and its devices."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.machine import Curve, StoreModel
from penstock.simulate.virtual import SharedPipe, VirtualServers, VirtualTime
from penstock.simulate.virtual_store import VirtualStore
from penstock.simulate.weather import Refusals, RequestWeather, Slow, Stalls, Weather


def test_events_of_one_time_happen_in_the_order_of_asking() -> None:
    time, seen = VirtualTime(), []
    for name in "abc":
        time.at(1.0, partial(seen.append, name))
    time.at(0.5, partial(seen.append, "first"))
    time.run(lambda: False)
    assert seen == ["first", "a", "b", "c"]


@given(
    sends=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1000)), min_size=1, max_size=20),
    each=st.sampled_from([30.0, 100.0, 1e9]),
)
def test_a_pipe_carries_everything_and_never_more_than_it_can(
    sends: list[tuple[float, int]], each: float
) -> None:
    time, ends = VirtualTime(), []
    pipe = SharedPipe(time, 100.0, each_bytes_s=each)

    def begin(size: int) -> None:
        began = time.now_s
        pipe.send(size, lambda: ends.append((time.now_s, size, began)))

    for at_s, size in sends:
        time.at(at_s, partial(begin, size))
    time.run(lambda: False)
    assert len(ends) == len(sends)
    for end, size, began in ends:
        assert end - began >= size / min(each, 100.0) * (1 - 1e-9)
    first, last = min(at for at, _ in sends), max(end for end, _, _ in ends)
    assert last - first >= sum(size for _, size in sends) / 100.0 * (1 - 1e-9)


def test_a_pipe_slows_down_what_is_under_way() -> None:
    time, ends = VirtualTime(), []
    pipe = SharedPipe(time, 100.0)
    pipe.send(100, lambda: ends.append(time.now_s))
    time.at(0.5, partial(pipe.slow_down, 10.0))
    time.at(1.5, partial(pipe.slow_down, 1.0))
    time.run(lambda: False)
    assert ends == [pytest.approx(0.5 + 1.0 + 0.4)]


def test_servers_count_their_work() -> None:
    time, done = VirtualTime(), []
    servers = VirtualServers(time, 1)
    for seconds in (1.0, 2.0):
        servers.ask(seconds, lambda: done.append(time.now_s))
    time.run(lambda: False)
    assert (done, servers.busy_s) == ([1.0, 3.0], 3.0)


STORE = StoreModel(latency_s=0.01, latency_p99_s=0.1, throughput=Curve.flat(1e6))


def test_latencies_have_the_median_and_the_tail_of_the_machine() -> None:
    draws = RequestWeather(STORE, Weather(seed=1))
    seen = sorted(draws.latency_s(0.0) for _ in range(20_000))
    assert seen[10_000] == pytest.approx(0.01, rel=0.05)
    assert seen[19_800] == pytest.approx(0.1, rel=0.15)


def test_measured_latencies_are_drawn_as_they_are() -> None:
    draws = RequestWeather(STORE, Weather(latencies_s=(0.5, 0.7)))
    assert {draws.latency_s(0.0) for _ in range(50)} == {0.5, 0.7}


def test_troubles_have_their_time() -> None:
    weather = Weather(
        latencies_s=(0.5,),
        slow=(Slow(factor=10, start_s=2, stop_s=4),),
        stalls=(Stalls(share=1.0, stall_s=3.0, start_s=6, stop_s=7),),
        refusals=(Refusals(share=1.0, start_s=8, stop_s=9),),
    )
    draws = RequestWeather(STORE, weather)
    assert [draws.latency_s(t) for t in (1, 2, 4, 6, 7)] == [0.5, 5.0, 0.5, 3.5, 0.5]
    assert [draws.is_refused(t) for t in (7, 8, 9)] == [False, True, False]
    assert weather.changes_s() == [2, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Slow(factor=0),
        lambda: Slow(factor=2, start_s=3, stop_s=3),
        lambda: Stalls(share=2, stall_s=1),
        lambda: Refusals(share=0.5, start_s=-1),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(OptionError):
        make()  # type: ignore[operator]


def read_all(model: StoreModel, weather: Weather, count: int) -> tuple[list[int], VirtualStore]:
    time, retries = VirtualTime(), []
    store = VirtualStore(time, model, weather)
    for _ in range(count):
        store.read(1000, retries.append)
    time.run(lambda: False)
    return retries, store


def limited(requests_s: float) -> StoreModel:
    return StoreModel(
        latency_s=0.0, latency_p99_s=0.0, throughput=Curve.flat(1e9), requests_s_max=requests_s
    )


def test_requests_above_the_limit_are_refused_and_asked_again() -> None:
    retries, store = read_all(limited(100.0), Weather(), 50)
    assert len(retries) == 50
    # A burst of a tenth of a second passes at once.
    assert retries.count(0) == 10
    assert store.num_refused == sum(retries) > 0
    assert store.num_requests == 50 + sum(retries)
    assert store.read_bytes == 50_000


def test_requests_above_the_limit_may_also_wait() -> None:
    retries, store = read_all(limited(100.0), Weather(excess="queue"), 50)
    assert (sum(retries), store.num_refused) == (0, 0)
    assert store.arrivals[-1][0] == pytest.approx(0.4, abs=0.02)
