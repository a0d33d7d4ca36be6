"""The parts of a shaper that need no process: shapes, draws, rates, heads."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.shaper import Fault, Fixed, Latency, LogNormal, Samples, Shape, Slow
from testkit.shaper_command import seconds_of
from testkit.shaper_draws import Draws
from testkit.shaper_http import BadHeadError, ChunkedEnd, answer_of, request_of
from testkit.shaper_pace import BYTE_BURST_S, REQUEST_BURST_S, ByteRate, RequestRate

from penstock.errors import OptionError

# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Fixed, {"latency_s": -0.1}),
        (Fixed, {"latency_s": math.inf}),
        (LogNormal, {"median_s": 0.0, "sigma": 1.0}),
        (LogNormal, {"median_s": 0.1, "sigma": math.nan}),
        (Samples, {"latencies_s": ()}),
        (Fault, {"kind": "flood"}),
        (Fault, {"kind": "reset", "share": 1.1}),
        (Fault, {"kind": "stall", "stall_s": 0.0}),
        (Fault, {"kind": "reset", "start_s": 2.0, "stop_s": 1.0}),
        (Slow, {"factor": 0.0, "start_s": 0.0, "stop_s": 1.0}),
        (Slow, {"factor": 2.0, "start_s": -1.0, "stop_s": 1.0}),
        (Shape, {"bandwidth_bytes_s": 0.0}),
        (Shape, {"connection_bytes_s": -1.0}),
        (Shape, {"requests_s": math.nan}),
        (Shape, {"excess": "drop"}),
    ],
)
def test_nonsense_is_refused_with_its_number(kind: type, values: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        kind(**values)
    assert any(str(value) in str(caught.value) or value == () for value in values.values())
    with pytest.raises(OptionError, match=r"-0\.1"):
        Samples((0.1, -0.1))


@pytest.mark.parametrize(
    "latency", [Fixed(0.02), LogNormal(0.02, 0.7), Samples((0.01, 0.02, 0.05))]
)
@given(shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=2))
def test_latencies_rise_with_the_share(latency: Latency, shares: list[float]) -> None:
    found = [latency.at(share) for share in sorted(shares)]
    assert found == sorted(found)
    assert all(0 <= each < math.inf for each in found)


def test_windows_of_a_timeline_multiply() -> None:
    shape = Shape(timeline=(Slow(10, 1.0, 3.0), Slow(2, 2.0, 4.0)))
    assert [shape.factor_at(at_s) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1, 10, 20, 2, 1]


def test_durations_are_read_as_people_write_them() -> None:
    assert [seconds_of(text) for text in ("20ms", "3 s", ".5", "7us")] == [0.02, 3, 0.5, 7e-6]
    with pytest.raises(OptionError, match="20 miles"):
        seconds_of("20 miles")


# -- draws -------------------------------------------------------------------------------------

_MIXED = Shape(
    latency=LogNormal(0.02, 0.5),
    faults=(Fault(kind="unavailable", share=0.2), Fault(kind="corrupt", share=0.2)),
)
_NAMES = [b"GET /data/x bytes=%d-" % number for number in range(100)]


def _treated(seed: int, names: list[bytes]) -> dict[bytes, list[object]]:
    """Treat requests in an order; each name's treatments, first attempt first."""
    draws, out = Draws(seed), dict[bytes, list[object]]()
    for name in names:
        out.setdefault(name, []).append(draws.treat(_MIXED, name, at_s=0.0, is_read=True))
    return out


@settings(max_examples=20)
@given(seed=st.integers(0, 2**64 - 1), shuffle=st.integers())
def test_the_order_of_requests_does_not_matter(seed: int, shuffle: int) -> None:
    shuffled = _NAMES * 2
    random.Random(shuffle).shuffle(shuffled)
    assert _treated(seed, _NAMES * 2) == _treated(seed, shuffled)


def test_seeds_and_attempts_differ() -> None:
    first = _treated(1, _NAMES * 2)
    assert first != _treated(2, _NAMES * 2)
    assert sum(a == b for a, b in first.values()) < 10


@settings(max_examples=20)
@given(share=st.floats(0, 1), seed=st.integers(0, 100))
def test_about_the_asked_share_goes_wrong(share: float, seed: int) -> None:
    shape, draws = Shape(faults=(Fault(kind="reset", share=share),)), Draws(seed)
    treated = [draws.treat(shape, b"%d" % n, at_s=0.0, is_read=True) for n in range(1000)]
    num_faults = sum(each.fault is not None for each in treated)
    assert abs(num_faults - 1000 * share) < 90  # more than five standard deviations


def test_faults_hit_only_their_window_path_and_kind_of_request() -> None:
    rule = Fault(kind="truncate", start_s=1.0, stop_s=2.0, path="shard-7")
    shape, draws = Shape(faults=(rule,)), Draws(0)

    def is_hit(name: bytes, at_s: float, *, is_read: bool = True) -> bool:
        return draws.treat(shape, name, at_s=at_s, is_read=is_read).fault is not None

    assert is_hit(b"GET /data/shard-7.tar", 1.0)
    assert is_hit(b"GET /data/shard-7.tar", 1.999)
    assert not is_hit(b"GET /data/shard-7.tar", 0.999)
    assert not is_hit(b"GET /data/shard-7.tar", 2.0)
    assert not is_hit(b"GET /data/shard-8.tar", 1.5)
    assert not is_hit(b"HEAD /data/shard-7.tar", 1.5, is_read=False)


def test_the_memory_for_attempts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testkit.shaper_draws.REMEMBERED_MAX", 100)
    draws, shape = Draws(0), Shape()
    for number in range(200):
        draws.treat(shape, b"%d" % number, at_s=0.0, is_read=True)
    assert len(draws._attempts) == 100


# -- rates -------------------------------------------------------------------------------------


@given(
    requests_s=st.floats(1, 1000),
    gaps_s=st.lists(st.floats(0, 0.05), min_size=1, max_size=200),
)
def test_no_window_lets_more_requests_through_than_allowed(
    requests_s: float, gaps_s: list[float]
) -> None:
    rate, now_s, passed = RequestRate(requests_s), 0.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        if rate.wait_s(now_s) == 0:
            rate.take(now_s)
            passed.append(now_s)
    assert passed  # at least one gets through, however low the rate
    burst = max(1.0, REQUEST_BURST_S * requests_s)
    for first, start_s in enumerate(passed):
        for count, stop_s in enumerate(passed[first:], start=1):
            assert count <= requests_s * (stop_s - start_s) + burst + 1e-6


@given(requests_s=st.floats(1, 1000), count=st.integers(1, 100))
def test_a_queue_lets_one_through_after_the_other(requests_s: float, count: int) -> None:
    rate, starts_s = RequestRate(requests_s), []
    for _ in range(count):
        starts_s.append(rate.wait_s(0.0))
        rate.take(0.0)
    burst = max(1.0, REQUEST_BURST_S * requests_s)
    assert starts_s == sorted(starts_s)
    assert starts_s[-1] == pytest.approx(max(0.0, (count - burst) / requests_s), abs=1e-6)


@given(
    bytes_s=st.floats(1e5, 1e9),
    naps_s=st.lists(st.floats(0, 0.02), min_size=1, max_size=100),
)
def test_bytes_keep_to_their_rate_however_late_the_loop_is(
    bytes_s: float, naps_s: list[float]
) -> None:
    rate, now_s, sent = ByteRate(bytes_s), 5.0, 0
    rate.begin(now_s)
    for nap_s in naps_s:
        now_s = max(now_s, rate.ready_at_s()) + nap_s
        while rate.ready_at_s() <= now_s:
            rate.spend(rate.chunk_bytes, now_s)
            sent += rate.chunk_bytes
    allowed = bytes_s * (now_s - 5.0 + BYTE_BURST_S)
    assert allowed <= sent + 1e-3 <= allowed + rate.chunk_bytes + 2e-3


def test_a_silence_saves_up_no_more_than_a_burst() -> None:
    rate = ByteRate(10e6)
    rate.begin(0.0)
    rate.spend(1000, 0.0)
    rate.begin(100.0)
    sent = 0
    while rate.ready_at_s() <= 100.0:
        rate.spend(rate.chunk_bytes, 100.0)
        sent += rate.chunk_bytes
    assert sent <= 10e6 * BYTE_BURST_S + rate.chunk_bytes


# -- heads -------------------------------------------------------------------------------------


@given(size_bytes=st.integers(1, 50), start=st.integers(0, 60), last=st.integers(0, 60))
def test_a_span_is_what_a_slice_gives(size_bytes: int, start: int, last: int) -> None:
    head = b"GET /b/x HTTP/1.1\r\nRange: bytes=%d-%d\r\n\r\n" % (start, last)
    data = bytes(range(size_bytes))
    span = request_of(head).span(size_bytes)
    assert (data[span[0] : span[1]] if span else b"") == data[start : last + 1]


@pytest.mark.parametrize(
    ("text", "span"), [(b"bytes=-3", (7, 10)), (b"bytes=4-", (4, 10)), (b"bytes=-0", None)]
)
def test_open_spans_end_with_the_object(text: bytes, span: tuple[int, int] | None) -> None:
    request = request_of(b"GET /b/x HTTP/1.1\r\nrange:  %s \r\n\r\n" % text)
    assert request.span(10) == span


def test_the_name_of_a_request_leaves_out_what_changes_when_it_is_asked_again() -> None:
    heads = [
        b"GET /b/x?token=%d HTTP/1.1\r\nHost: a\r\nRange: bytes=1-2\r\nX-Amz-Date: %d\r\n\r\n"
        % (n, n)
        for n in range(2)
    ]
    assert {request_of(head).name for head in heads} == {b"GET /b/x bytes=1-2"}


@pytest.mark.parametrize(
    ("target", "is_read"),
    [(b"/b/x", True), (b"/b/x?versionId=1", True), (b"/b?list-type=2", False), (b"/b/", True)],
)
def test_only_objects_are_read(target: bytes, is_read: bool) -> None:
    assert request_of(b"GET %s HTTP/1.1\r\n\r\n" % target).is_read == is_read


@pytest.mark.parametrize(
    ("method", "head", "length"),
    [
        (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", 7),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", 0),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\n\r\n", 0),
        (b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "chunked"),
        (b"GET", b"HTTP/1.0 200 OK\r\n\r\n", "until close"),
    ],
)
def test_the_length_of_an_answer_follows_from_its_head(
    method: bytes, head: bytes, length: int | str
) -> None:
    assert answer_of(head, method).length == length


@pytest.mark.parametrize("head", [b"hello\r\n\r\n", b"GET / FTP/1.0\r\n\r\n", b"\0\0\r\n\r\n"])
def test_what_is_not_http_is_refused(head: bytes) -> None:
    with pytest.raises(BadHeadError):
        request_of(head)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1),
    after=st.binary(max_size=20),
)
def test_the_end_of_a_chunked_body_is_found_however_it_is_cut(
    chunks: list[bytes], cuts: list[int], after: bytes
) -> None:
    body = b"".join(b"%x;note\r\n%s\r\n" % (len(each), each) for each in chunks)
    body += b"0\r\nSome-Trailer: 1\r\n\r\n"
    found, at, end, step = 0, 0, ChunkedEnd(), 0
    while at < len(body + after) and not end.has_ended:
        piece = (body + after)[at : at + cuts[step % len(cuts)]]
        found += end.feed(piece)
        at, step = at + len(piece), step + 1
    assert end.has_ended
    assert found == len(body)
