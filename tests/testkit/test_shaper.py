"""A shaped folder on the wire. Times are lower bounds that a shape promises."""

from __future__ import annotations

import contextlib
import http.client
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from testkit.shaper import Fault, Fixed, LogNormal, Samples, Shape, Shaper, Slow

import penstock
from penstock.errors import (
    NotFoundError,
    StoreError,
    TruncatedError,
    UnavailableError,
)
from penstock.storage import ObjectInfo, RemoteStore, Store, open_store
from penstock.testing.conformance import OBJECTS, ReadConformance, some_bytes
from penstock.testing.forks import HANG_S
from penstock.testing.ports import HOST

DATA = some_bytes(5_000_000, "shaped")
X = ObjectInfo(key="x", size_bytes=len(DATA))
PLAIN = Shape()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shaped")
    (root / "x").write_bytes(DATA)
    return root


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Shaper]:
    """One process for the tests of this file that only need some shape."""
    with Shaper.of_folder(folder, seed=7) as shaper:
        yield shaper


@pytest.fixture
def shaper(running: Shaper) -> Iterator[Shaper]:
    yield running
    running.reshape(PLAIN)


def address(shaper: Shaper) -> tuple[str, int]:
    return HOST, int(shaper.endpoint.rpartition(":")[2])


def get(shaper: Shaper, offset: int = 0, length: int = 1000) -> tuple[int, bytes]:
    """Ask for a range on a connection of its own."""
    client = http.client.HTTPConnection(*address(shaper), timeout=HANG_S)
    try:
        span = f"bytes={offset}-{offset + length - 1}"
        client.request("GET", "/data/x", headers={"Range": span})
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def took_s(action: Callable[[], object]) -> float:
    begin_s = time.monotonic()
    action()
    return time.monotonic() - begin_s


# -- bytes are exact ---------------------------------------------------------------------------


def _write_objects(root: Path) -> None:
    for key, data in OBJECTS.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestFolderByS3(ReadConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shaper]:
        root = tmp_path_factory.mktemp("objects")
        _write_objects(root)
        with Shaper.of_folder(root, Shape(latency=Fixed(0.001))) as shaper:
            yield shaper

    @pytest.fixture
    def filled(self, served: Shaper) -> Store:
        return RemoteStore(served.uri, served.options)

    def test_it_lists_what_is_there(self, filled: RemoteStore) -> None:
        listed = [(info.key, info.size_bytes) for info in filled.list()]
        assert listed == sorted((key, len(data)) for key, data in OBJECTS.items())
        assert [info.key for info in filled.list("folder/in")] == ["folder/inner/c.bin"]

    def test_it_cannot_be_written(self, filled: RemoteStore) -> None:
        with pytest.raises(StoreError, match="405"):
            filled.write("new", some_bytes(1_000_000))
        assert filled.read("a.bin") == OBJECTS["a.bin"]


def test_a_folder_can_be_read_by_plain_http(shaper: Shaper) -> None:
    store = RemoteStore(shaper.url)
    assert store.read("x") == DATA
    assert store.read_range(X, 77, 1000) == DATA[77:1077]
    assert store.info("x").size_bytes == len(DATA)


def test_listings_of_several_pages_are_complete(tmp_path: Path) -> None:
    names = sorted(f"{number % 7}/{number:04d}" for number in range(2100))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with Shaper.of_folder(tmp_path, bucket="many") as shaper:
        store = RemoteStore("s3://many/", shaper.options)
        assert [info.key for info in store.list()] == names
        assert shaper.counts().requests == 3
        path = "/many/?list-type=2&delimiter=%2F&max-keys=5"
        client = http.client.HTTPConnection(*address(shaper), timeout=HANG_S)
        client.request("GET", path)
        first = client.getresponse().read().decode()
        token = first.partition("<NextContinuationToken>")[2].partition("<")[0]
        client.request("GET", f"{path}&continuation-token={token}")
        second = client.getresponse().read().decode()
        client.close()
    assert [f"<Prefix>{n}/</Prefix>" in first for n in range(7)] == [True] * 5 + [False] * 2
    assert [f"<Prefix>{n}/</Prefix>" in second for n in range(7)] == [False] * 5 + [True] * 2


@pytest.mark.parametrize(
    "path", ["/data/../x", "/data/%2e%2e/x", "/data//x", "/data/.", "/other/x"]
)
def test_nothing_outside_the_folder_is_served(shaper: Shaper, path: str) -> None:
    client = http.client.HTTPConnection(*address(shaper), timeout=HANG_S)
    client.request("GET", path)
    assert client.getresponse().status == 404
    client.close()


def test_a_file_that_is_replaced_is_served_anew(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"first")
    with Shaper.of_folder(tmp_path) as shaper:
        store = RemoteStore(shaper.uri, shaper.options)
        before = store.info("x").etag
        (tmp_path / "new").write_bytes(b"second")
        (tmp_path / "new").rename(tmp_path / "x")
        assert store.read("x") == b"second"
        assert store.info("x").etag != before


def test_a_data_set_can_be_loaded_from_a_shaped_folder(tmp_path: Path) -> None:
    with penstock.Writer(tmp_path) as writer:
        for number in range(50):
            writer.write({"txt": f"text {number}"})
    shape = Shape(latency=LogNormal(0.002, 0.5), bandwidth_bytes_s=50e6)
    with Shaper.of_folder(tmp_path, shape) as shaper:
        # Not checked: a listing by S3 does not tell times as exactly as the folder did.
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        with penstock.Loader(dataset, batch_size=10, seed=1) as loader:
            texts = [text for batch in loader for text in batch["txt"]]
    assert sorted(texts) == sorted(f"text {number}" for number in range(50))


# -- times -------------------------------------------------------------------------------------


def test_latencies_add_up(shaper: Shaper) -> None:
    store = RemoteStore(shaper.uri, shaper.options)
    shaper.reshape(Shape(latency=Fixed(0.05)))
    assert took_s(lambda: [store.read_range(X, n, 10) for n in range(20)]) >= 1.0


def test_requests_wait_side_by_side(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(latency=Samples((0.5,))))
    start = threading.Barrier(64)

    def ask(number: int) -> tuple[int, bytes]:
        start.wait()
        return get(shaper, number, 100)

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(64)))
    assert answers == [(206, DATA[number : number + 100]) for number in range(64)]
    assert (shaper.counts() - before).late_max_s >= 0
    assert shaper.counts().concurrency_max > 32


@pytest.mark.parametrize("limit", ["bandwidth_bytes_s", "connection_bytes_s"])
def test_bytes_come_at_their_rate(shaper: Shaper, limit: str) -> None:
    shaper.reshape(Shape(**{limit: 10e6}))  # type: ignore[arg-type]
    store = RemoteStore(shaper.uri, shaper.options)
    assert took_s(lambda: store.read("x")) >= 0.45
    assert store.read("x") == DATA


def _arriving(shaper: Shaper, num_clients: int, stop_bytes: int) -> list[int]:
    """Read the object on several connections; return what each has when one has so many bytes."""
    sizes = dict[socket.socket, int]()
    with contextlib.ExitStack() as held, selectors.DefaultSelector() as selector:
        for _ in range(num_clients):
            client = held.enter_context(socket.create_connection(address(shaper), HANG_S))
            selector.register(client, selectors.EVENT_READ)
            sizes[client] = 0
        for client in sizes:
            client.sendall(b"GET /data/x HTTP/1.1\r\nHost: a\r\n\r\n")
        while max(sizes.values()) < stop_bytes:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                sizes[key.fileobj] += len(key.fileobj.recv(65536))
    return list(sizes.values())


def test_connections_share_the_bandwidth_fairly(shaper: Shaper) -> None:
    shaper.reshape(Shape(bandwidth_bytes_s=4e6))
    sizes = _arriving(shaper, 4, 500_000)
    assert min(sizes) > 0.5 * max(sizes)


def test_connections_do_not_share_their_own_rates(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(connection_bytes_s=2e6))
    begin_s = time.monotonic()
    sizes = _arriving(shaper, 4, 500_000)
    sent_bytes = (shaper.counts() - before).body_bytes
    elapsed_s = time.monotonic() - begin_s
    assert elapsed_s >= 0.2
    assert sum(sizes) * 0.9 < sent_bytes <= 4 * (2e6 * elapsed_s + 65536)
    assert min(sizes) > 0.5 * max(sizes)


def test_a_new_shape_holds_for_answers_under_way(shaper: Shaper) -> None:
    shaper.reshape(Shape(bandwidth_bytes_s=50e3))  # all of it would take 100 s
    with ThreadPoolExecutor(1) as threads:
        before = shaper.counts()
        reading = threads.submit(get, shaper, 0, len(DATA))
        while shaper.counts().body_bytes == before.body_bytes:
            time.sleep(0.001)
        shaper.reshape(PLAIN)
        assert reading.result(HANG_S) == (206, DATA)


def test_a_slow_time_begins_and_ends(shaper: Shaper) -> None:
    shaper.reshape(Shape(latency=Fixed(0.02), timeline=(Slow(10, 0.0, 30.0),)))
    assert took_s(lambda: get(shaper)) >= 0.2
    shaper.reshape(Shape(latency=Fixed(0.001), timeline=(Slow(HANG_S * 1000, 60.0, 600.0),)))
    assert get(shaper)[0] == 206


def test_a_slow_time_slows_bytes_too(shaper: Shaper) -> None:
    shaper.reshape(Shape(bandwidth_bytes_s=100e6, timeline=(Slow(10, 0.0),)))
    assert took_s(lambda: get(shaper, 0, len(DATA))) >= 0.45


# -- limits of requests, storms ----------------------------------------------------------------


def test_requests_above_the_rate_are_refused(shaper: Shaper) -> None:
    begin_s = time.monotonic()
    before = shaper.reshape(Shape(requests_s=5))
    statuses = [get(shaper)[0] for _ in range(40)]
    elapsed_s = time.monotonic() - begin_s
    counts = shaper.counts() - before
    assert 1 <= statuses.count(206) <= 5 * elapsed_s + 2
    assert counts.unavailable == statuses.count(503) == 40 - statuses.count(206) > 0
    assert counts.faults == {}


def test_requests_above_the_rate_can_wait(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(requests_s=20, excess="queue"))
    begin_s = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda n: get(shaper, n, 9), range(12)))
    assert time.monotonic() - begin_s >= 0.49
    assert answers == [(206, DATA[n : n + 9]) for n in range(12)]
    assert (shaper.counts() - before).unavailable == 0


def test_a_storm_rages_in_its_window_and_only_there(shaper: Shaper) -> None:
    storm = Fault(kind="unavailable", start_s=0.2, stop_s=0.4)
    early_s = time.monotonic()
    before = shaper.reshape(Shape(faults=(storm,)))
    late_s = time.monotonic()
    seen = []
    while time.monotonic() < late_s + 0.6:
        asked_s = time.monotonic()
        status = get(shaper)[0]
        # When the shaper got it, in its own time: at least, at most.
        seen.append((asked_s - late_s, time.monotonic() - early_s, status))
    assert all(status == 503 for low, high, status in seen if low >= 0.2 and high < 0.4)
    assert all(status == 206 for low, high, status in seen if high < 0.2 or low >= 0.4)
    statuses = [status for _, _, status in seen]
    counts = shaper.counts() - before
    assert counts.unavailable == counts.faults.get("unavailable", 0) == statuses.count(503)
    assert counts.requests == len(seen)


def test_a_refusal_is_what_s3_says(shaper: Shaper) -> None:
    shaper.reshape(Shape(faults=(Fault(kind="unavailable"),)))
    status, body = get(shaper)
    assert status == 503
    assert b"<Code>SlowDown</Code>" in body
    store = RemoteStore(shaper.uri, shaper.options)
    for ask in (lambda: store.info("x"), lambda: list(store.list()), lambda: store.read("x")):
        with pytest.raises(UnavailableError, match="503"):
            ask()


# -- faults ------------------------------------------------------------------------------------


def _outcome(store: Store, offset: int) -> str:
    try:
        data = store.read_range(X, offset, 5000)
    except StoreError as error:
        return type(error).__name__
    return "right" if data == DATA[offset : offset + 5000] else "corrupt"


def test_the_same_seed_fails_the_same_reads_on_any_number_of_threads(folder: Path) -> None:
    kinds = ("unavailable", "truncate", "corrupt", "reset")
    shape = Shape(faults=tuple(Fault(kind=kind, share=0.15) for kind in kinds))
    runs = []
    for num_threads, seed in ((1, 3), (8, 3), (8, 4)):
        with Shaper.of_folder(folder, shape, seed=seed) as shaper:
            store = RemoteStore(shaper.uri, shaper.options)
            with ThreadPoolExecutor(num_threads) as threads:
                runs.append(list(threads.map(_outcome, [store] * 80, range(0, 8000, 100))))
        names = dict.fromkeys(kinds, 0) | shaper.counts().faults
        outcomes = ("UnavailableError", "TruncatedError", "corrupt", "UnreachableError")
        assert [names[kind] for kind in kinds] == [runs[-1].count(each) for each in outcomes]
        assert min(names.values()) > 0
    assert runs[0] == runs[1] != runs[2]


def test_corruption_changes_one_byte(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(faults=(Fault(kind="corrupt"),)))
    status, data = get(shaper, 0, 100_000)
    assert (status, len(data)) == (206, 100_000)
    assert sum(a != b for a, b in zip(data, DATA, strict=False)) == 1
    assert (shaper.counts() - before).faults == {"corrupt": 1}


def test_truncation_ends_the_body_early(shaper: Shaper) -> None:
    shaper.reshape(Shape(faults=(Fault(kind="truncate"),)))
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(shaper, 0, 100_000)
    assert DATA.startswith(caught.value.partial)
    with pytest.raises(TruncatedError):
        RemoteStore(shaper.uri, shaper.options).read("x")


def test_a_stall_is_silence_and_then_the_rest(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(faults=(Fault(kind="stall", stall_s=0.3),)))
    begin_s = time.monotonic()
    assert get(shaper, 0, 100_000) == (206, DATA[:100_000])
    assert time.monotonic() - begin_s >= 0.3
    assert (shaper.counts() - before).faults == {"stall": 1}


def test_a_reset_breaks_the_connection(shaper: Shaper) -> None:
    shaper.reshape(Shape(faults=(Fault(kind="reset"),)))
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        get(shaper, 0, 100_000)


def test_faults_of_bodies_leave_errors_listings_and_heads_alone(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(faults=(Fault(kind="truncate"), Fault(kind="corrupt"))))
    store = RemoteStore(shaper.uri, shaper.options)
    assert store.info("x").size_bytes == len(DATA)
    assert [info.key for info in store.list()] == ["x"]
    with pytest.raises(NotFoundError):
        store.read("y")
    assert (shaper.counts() - before).faults == {}


def test_retries_get_through(shaper: Shaper) -> None:
    kinds = ("unavailable", "truncate", "reset")
    shaper.reshape(Shape(faults=tuple(Fault(kind=kind, share=0.2) for kind in kinds)))
    store = open_store(shaper.uri, shaper.options)
    for number in range(10):
        assert store.read_range(X, number, 5000) == DATA[number : number + 5000]


# -- connections -------------------------------------------------------------------------------


def _received(client: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = client.recv(size_bytes - len(data))
        assert piece, "the shaper hung up"
        data += piece
    return bytes(data)


def test_requests_sent_together_are_answered_in_order(shaper: Shaper) -> None:
    one = b"GET /data/x HTTP/1.1\r\nHost: a\r\nRange: bytes=%d-%d\r\n\r\n"
    with socket.create_connection(address(shaper), timeout=HANG_S) as client:
        client.sendall(b"".join(one % (n, n) for n in range(5)) + b"GET /data/x HT")
        client.sendall(b"TP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answered = b""
        while piece := client.recv(65536):
            answered += piece
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answered.split(b"HTTP/1.1 20")[1:]]
    assert bodies == [DATA[n : n + 1] for n in range(5)] + [DATA]


def test_an_old_client_is_hung_up_on(shaper: Shaper) -> None:
    with socket.create_connection(address(shaper), timeout=HANG_S) as client:
        client.sendall(b"GET /data/x HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").read().endswith(b"\r\n\r\n" + DATA)


def test_noise_and_lost_clients_do_no_harm(shaper: Shaper) -> None:
    before = shaper.reshape(Shape(bandwidth_bytes_s=1e6))
    for noise in (
        b"\0\1\2\r\n\r\n",
        b"x" * 100_000,
        b"PUT /a HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection(address(shaper), timeout=HANG_S) as client:
            try:
                client.sendall(noise)
                assert client.recv(10) == b""
            except ConnectionError:
                pass
    with socket.create_connection(address(shaper), timeout=HANG_S) as client:
        client.sendall(b"GET /data/x HTTP/1.1\r\nHost: a\r\n\r\n")
        _received(client, 1000)
    while (shaper.counts() - before).aborted == 0:
        time.sleep(0.001)
    shaper.reshape(PLAIN)
    assert get(shaper, 3, 5) == (206, DATA[3:8])
