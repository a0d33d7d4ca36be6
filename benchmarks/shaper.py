"""What does the shaping proxy of the test kit cost, and how exactly does it shape?

    python -m benchmarks.shaper [--seaweed]

110 kB ranged GETs by a client in C (obstore) on 32 threads, against a folder served by the shaper,
and with --seaweed through the shaper against SeaweedFS and beside it. Limits measured in the same
run: reading the same ranges with `preadv`, and SeaweedFS asked directly. `CPU s/GB` is the shaper's
own process. Then, with one thread of our own: latencies and bandwidths as they arrive.
"""

import argparse
import contextlib
import os
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import obstore
from obstore.store import S3Store
from testkit.shaper import Fixed, LogNormal, Shape, Shaper

from penstock.testing.servers import SeaweedServer

ROUNDS, ROUND_S = 3, 1.5
FILE_BYTES, RANGE_BYTES, THREADS = 64_000_000, 110_000, 32
Read = Callable[[int], object]


def rate(read: Read) -> float:
    """Return bytes a second of many threads that read ranges for a while."""
    counts = [0] * THREADS
    stop_s = time.perf_counter() + ROUND_S

    def work(number: int) -> None:
        at = number
        while time.perf_counter() < stop_s:
            read(at * 7919 * 4096 % (FILE_BYTES - RANGE_BYTES))
            counts[number] += 1
            at += THREADS

    begin = time.perf_counter()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * RANGE_BYTES / (time.perf_counter() - begin)


def obstore_read(endpoint: str, bucket: str, **keys: object) -> Read:
    store = S3Store(
        bucket,
        endpoint=endpoint,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        **keys,
    )
    return lambda offset: obstore.get_range(store, "x", start=offset, length=RANGE_BYTES)


def show(name: str, shaper: Shaper, read: Read, limit: str, limit_read: Read) -> None:
    """Print rates of both in turns, and what the shaper used."""
    rates, limits, costs = [], [], []
    for _ in range(ROUNDS):
        limits.append(rate(limit_read))
        before = shaper.counts()
        rates.append(rate(read))
        spent = shaper.counts() - before
        costs.append(spent.cpu_s / (spent.body_bytes / 1e9))
    ratio = median(a / b for a, b in zip(rates, limits, strict=True))
    print(
        f"{name}: {median(rates) / 1e6:.0f} MB/s, {median(costs):.2f} CPU s/GB, "
        f"{ratio:.2f} of {limit} ({median(limits) / 1e6:.0f} MB/s)"
    )


def folder_rates(folder: Path) -> None:
    file = os.open(folder / "x", os.O_RDONLY)
    with Shaper.of_folder(folder) as free:
        direct = obstore_read(free.endpoint, "data", skip_signature=True)
        by_hand = "pread on 32 threads"
        show("folder", free, direct, by_hand, lambda at: os.pread(file, RANGE_BYTES, at))
        for name, shape in (
            ("folder, 200 MB/s", Shape(bandwidth_bytes_s=200e6)),
            ("folder, 20 ms, 100 MB/s", Shape(latency=Fixed(0.02), bandwidth_bytes_s=100e6)),
        ):
            with Shaper.of_folder(folder, shape) as shaper:
                read = obstore_read(shaper.endpoint, "data", skip_signature=True)
                show(name, shaper, read, "the folder without limits", direct)
    os.close(file)


def seaweed_rates(folder: Path) -> None:
    with SeaweedServer() as access, Shaper(access.endpoint) as shaper:
        access.create_bucket("data")
        keys = {"access_key_id": access.access_key, "secret_access_key": access.secret_key}
        store = S3Store(
            "data",
            endpoint=access.endpoint,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            **keys,
        )
        obstore.put(store, "x", (folder / "x").read_bytes())
        read = obstore_read(shaper.endpoint, "data", **keys)
        direct = obstore_read(access.endpoint, "data", **keys)
        show("SeaweedFS through the shaper", shaper, read, "SeaweedFS directly", direct)


# -- accuracy --------------------------------------------------------------------------------


def asked(size_bytes: int) -> bytes:
    return f"GET /data/x HTTP/1.1\r\nHost: a\r\nRange: bytes=0-{size_bytes - 1}\r\n\r\n".encode()


def waits_s(address: tuple[str, int], num_clients: int, wait_s: float) -> list[float]:
    """Return times to the first byte; clients ask 20 times each, evenly spread over a latency."""
    found = []
    with contextlib.ExitStack() as held, selectors.DefaultSelector() as selector:
        for _ in range(num_clients):
            client = held.enter_context(socket.create_connection(address))
            selector.register(client, selectors.EVENT_READ, [0.0, 0])
            time.sleep(wait_s / num_clients)
            selector.get_key(client).data[0] = time.perf_counter()
            client.sendall(asked(1000))
        while selector.get_map():
            for key, _ in selector.select():
                now_s = time.perf_counter()
                client, state = key.fileobj, key.data
                assert len(client.recv(4096)) > 1000
                if state[1] > 0:  # first answers wait until all clients have asked
                    found.append(now_s - state[0])
                state[1] += 1
                if state[1] > 20:
                    selector.unregister(client)
                else:
                    state[0] = time.perf_counter()
                    client.sendall(asked(1000))
    return found


def arrived_bytes_s(address: tuple[str, int], size_bytes: int) -> float:
    """Return the rate at which a body arrives."""
    begin = time.perf_counter()
    with socket.create_connection(address) as client:
        client.sendall(asked(size_bytes))
        left = size_bytes
        while left > 0:
            left -= len(client.recv(2**18))
    return size_bytes / (time.perf_counter() - begin)


def accuracy(folder: Path) -> None:
    with Shaper.of_folder(folder) as shaper:
        address = ("127.0.0.1", int(shaper.endpoint.rpartition(":")[2]))
        for num_clients, wait_s in ((1, 0.02), (32, 0.02), (256, 0.1)):
            shaper.reshape(Shape(latency=Fixed(wait_s)))
            late = [1e3 * (each - wait_s) for each in waits_s(address, num_clients, wait_s)]
            p50, p99 = (quantiles(late, n=100)[rank] for rank in (49, 98))
            print(
                f"{1e3 * wait_s:.0f} ms with {num_clients} waiting: "
                f"{p50:.2f} ms late (p50), {p99:.2f} ms (p99)"
            )
        shaper.reshape(Shape(latency=LogNormal(0.020, 0.5)))
        print(f"lognormal, median 20 ms: {1e3 * median(waits_s(address, 16, 0.02)):.1f} ms (p50)")
        for bytes_s in (10e6, 100e6, 400e6):
            shaper.reshape(Shape(bandwidth_bytes_s=bytes_s))
            got = arrived_bytes_s(address, int(min(bytes_s, FILE_BYTES)))
            print(f"{bytes_s / 1e6:.0f} MB/s: {got / bytes_s:.3f} of it arrives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seaweed", action="store_true", help="also a real store")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x").write_bytes(os.urandom(FILE_BYTES))
        folder_rates(folder)
        if args.seaweed:
            seaweed_rates(folder)
        accuracy(folder)


if __name__ == "__main__":
    main()
