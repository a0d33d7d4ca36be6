"""How fast does a node read samples of 110 KB from another node's tier?

    python -m benchmarks.peer_reads [--rounds 5] [--seconds 2] [--tls] [--json FILE]
    python -m benchmarks.peer_reads --netns SERVER ASKER --bind 10.0.0.1

A process with a tier on tmpfs serves, another asks for samples at random, 1, 8 or 16 in an ask,
with one or four asks outstanding. Limits, in turns with it over the same link: iperf3 (if it is
installed), and two Python processes with a plain socket, one that sends the tier's file in order
(`sendfile`) and one that reads into one buffer. `CPU s/GB` counts both sides. `us` is from an ask
to its last byte. `of iperf3` divides by the limit of the same round; the bytes are checked apart
from the clock. With --netns the two sides run in network namespaces that are there already, so that
the link can be anything.
"""

import argparse
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

from benchmarks.compare import conditions
from penstock.engine.peers.base import Address, Answer, Ask, NoGossip, Shelves
from penstock.engine.peers.client import PeerClient
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.settings import PeerSettings
from penstock.engine.peers.shelf import TierShelf
from penstock.engine.peers.tls import client_context, server_context
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Memory

SAMPLE_BYTES, NUM_SAMPLES = 110_000, 4096
BATCHES, DEPTHS = (1, 8, 16), (1, 4)
RUN, SECRET, SHELF = b"r" * 16, b"s" * 32, b"benchmark's name"
ROOT = Path(__file__).parents[1]
RAW_BYTES = 2**20


def tls_settings(folder: str) -> PeerSettings:
    cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
    return PeerSettings(tls_cert=cert, tls_key=key, tls_ca=cert)


# -- the side that serves --------------------------------------------------------------------


def serve(bind: str, tls_folder: str) -> None:
    """Serve a tier, and raw bytes of its file; answer commands on stdin with lines of JSON."""
    lengths = np.full(NUM_SAMPLES, SAMPLE_BYTES, np.int64)
    shape = TierShape(name="peer-reads", offsets=np.cumsum(lengths) - lengths, lengths=lengths)
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="penstock-bench-")
    try:
        with open_tiers([Memory(NUM_SAMPLES * SAMPLE_BYTES, folder=folder)], shape) as tiers:
            tier = tiers.tiers[0]
            rng = np.random.default_rng(0)
            for unit in range(NUM_SAMPLES):
                assert tier.claim(unit)
                tier.write(unit, rng.bytes(SAMPLE_BYTES))
                tier.release(unit)
            shelves = Shelves()
            shelves.add(TierShelf(SHELF, tiers, lambda: 0, lambda: False))
            ports = {}
            contexts: dict[str, ssl.SSLContext | None] = {"plain": None}
            if tls_folder:
                contexts["tls"] = server_context(tls_settings(tls_folder))
            for name, context in contexts.items():
                server = PeerServer(
                    name="bench",
                    shelves=shelves,
                    secrets={RUN: SECRET}.get,
                    bind=[Address(host=bind, port=0)],
                    gossip=NoGossip(),
                    tls=context,
                )
                server.start()
                ports[name] = server.address.port
            ports["raw"] = raw_server(bind, tier.descriptor)
            print(json.dumps(ports), flush=True)
            for _ in sys.stdin:
                print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    finally:
        shutil.rmtree(folder)


def raw_server(bind: str, descriptor: int) -> int:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.create_server((bind, 0), family=family)

    def send(sock: socket.socket) -> None:
        size = NUM_SAMPLES * SAMPLE_BYTES // RAW_BYTES * RAW_BYTES
        with sock:
            while True:
                for offset in range(0, size, RAW_BYTES):
                    left = RAW_BYTES
                    while left:
                        try:
                            left -= os.sendfile(
                                sock.fileno(), descriptor, offset + RAW_BYTES - left, left
                            )
                        except OSError:
                            return

    def accept() -> None:
        while True:
            send(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


# -- the side that asks ----------------------------------------------------------------------


def ask(host: str, ports: dict[str, int], tls_folder: str) -> None:
    """Do what lines of JSON on stdin say; answer each with one."""
    clients = {"plain": PeerClient(name="asker", run_id=RUN, secret=SECRET)}
    if tls_folder:
        tls = client_context(tls_settings(tls_folder))
        clients["tls"] = PeerClient(name="asker", run_id=RUN, secret=SECRET, tls=tls)
    for line in sys.stdin:
        task = json.loads(line)
        if task["what"] == "raw":
            result = read_raw(host, ports["raw"], task["seconds"])
        else:
            address = Address(host=host, port=ports[task["what"]])
            result = read_samples(clients[task["what"]], address, task)
        print(json.dumps(result), flush=True)


def read_raw(host: str, port: int, seconds: float) -> dict:
    into = memoryview(bytearray(RAW_BYTES))
    with socket.create_connection((host, port)) as sock:
        sock.recv_into(into)
        cpu_s, begin, count = time.process_time(), time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            count += sock.recv_into(into)
        taken_s = time.perf_counter() - begin
    return {"bytes": count, "seconds": taken_s, "cpu_s": time.process_time() - cpu_s}


def read_samples(client: PeerClient, address: Address, task: dict) -> dict:
    """Keep some asks outstanding for a while, or check the bytes of a few."""
    batch, depth = task["batch"], task["depth"]
    rng = np.random.default_rng(1)
    draws = rng.integers(0, NUM_SAMPLES, (1024, batch))
    lengths = np.full_like(draws, SAMPLE_BYTES)
    rows = np.stack([draws, draws * SAMPLE_BYTES, lengths, lengths * 0, lengths], axis=2)
    asks = [Ask(shelf=SHELF, ranges=np.ascontiguousarray(each)) for each in rows]
    buffers = [memoryview(bytearray(batch * SAMPLE_BYTES)) for _ in range(depth)]
    taken_s: list[float] = []
    has_ended = threading.Semaphore(0)
    end_s = time.perf_counter() + task["seconds"]
    number = iter(range(10**9))

    def go_on(place: int) -> None:
        def done(answer: object) -> None:
            assert isinstance(answer, Answer), answer
            assert not answer.absent
            if task.get("check"):
                parts = [buffers[place][at:][:SAMPLE_BYTES] for at in offsets(batch)]
                assert [xxhash.xxh3_64_intdigest(part) for part in parts] == list(answer.sums)
            taken_s.append(answer.seconds)
            if time.perf_counter() < end_s:
                go_on(place)
            else:
                has_ended.release()

        this = asks[next(number) % len(asks)]
        client.ask("bench", [address], this, buffers[place], parked=lambda: None, done=done)

    cpu_s, begin = time.process_time(), time.perf_counter()
    for place in range(depth):
        go_on(place)
    for _ in range(depth):
        assert has_ended.acquire(timeout=60)
    seconds = time.perf_counter() - begin
    p50, p99 = np.quantile(taken_s, (0.5, 0.99)).tolist()
    return {
        "bytes": len(taken_s) * batch * SAMPLE_BYTES,
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_s,
        "p50_us": 1e6 * p50,
        "p99_us": 1e6 * p99,
    }


def offsets(batch: int) -> range:
    return range(0, batch * SAMPLE_BYTES, SAMPLE_BYTES)


# -- both ------------------------------------------------------------------------------------


class Side:
    """One of the two processes."""

    def __init__(self, prefix: list[str], *words: str) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks.peer_reads", *words]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a side of the benchmark has ended"
        return json.loads(line)

    def ask(self, task: dict) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def iperf(prefixes: tuple[list[str], list[str]], bind: str, seconds: float) -> dict:
    """Return what one stream of iperf3 brings, from the side that serves to the one that asks."""
    port = "5917"
    listening = subprocess.Popen(
        [*prefixes[0], "iperf3", "-s", "-1", "-B", bind, "-p", port], stdout=subprocess.DEVNULL
    )
    try:
        time.sleep(0.3)  # it does not say when it listens to a pipe
        command = [*prefixes[1], "iperf3", "-c", bind, "-p", port, "-R", "-J", "-t", str(seconds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    finally:
        listening.wait(10)
    end = json.loads(done.stdout)["end"]
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    percent = cpu["host_total"] + cpu["remote_total"]
    taken_s = received["seconds"]
    return {"bytes": received["bytes"], "seconds": taken_s, "cpu_s": taken_s * percent / 100}


def measured(served: Side, asker: Side, task: dict) -> dict:
    before = served.ask({})["cpu_s"]
    result = asker.ask(task)
    result["cpu_s"] += served.ask({})["cpu_s"] - before
    return result


def turns_of(
    options: argparse.Namespace, served: Side, asker: Side, prefixes: tuple[list[str], list[str]]
) -> dict[str, Callable[[], dict]]:
    turns: dict[str, Callable[[], dict]] = {}
    if shutil.which("iperf3"):
        seconds = max(1, round(options.seconds))
        turns["iperf3"] = lambda: iperf(prefixes, options.bind, seconds)
    else:
        print("iperf3 is not installed: its row is missing", file=sys.stderr)
    tasks = {"plain sockets": {"what": "raw"}}
    for kind in ("plain", "tls") if options.tls else ("plain",):
        for depth in DEPTHS:
            for batch in BATCHES:
                name = f"{'TLS, ' if kind == 'tls' else ''}{batch} a time, {depth} outstanding"
                tasks[name] = {"what": kind, "batch": batch, "depth": depth}
    for name, task in tasks.items():
        full = {**task, "seconds": options.seconds}
        turns[name] = lambda full=full: measured(served, asker, full)
    return turns


def report(rows: dict[str, list[dict]]) -> None:
    print(f"{__doc__.splitlines()[0]}\n{conditions()}\n")
    print("| reading | GB/s | min..max | of iperf3 | CPU s/GB | p50 us | p99 us |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    limits = [each["bytes"] / each["seconds"] for each in rows.get("iperf3", [])]
    for name, results in rows.items():
        rates = [each["bytes"] / each["seconds"] for each in results]
        shares = [rate / limit for rate, limit in zip(rates, limits, strict=False)]
        cpu = median(each["cpu_s"] / each["bytes"] * 1e9 for each in results)
        late = [
            f"{median(each[name] for each in results):.0f}" if name in results[0] else "-"
            for name in ("p50_us", "p99_us")
        ]
        cells = [
            f"{median(rates) / 1e9:.2f}",
            f"{min(rates) / 1e9:.2f}..{max(rates) / 1e9:.2f}",
            f"{median(shares):.2f}" if shares else "-",
            f"{cpu:.2f}",
            *late,
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def make_certificate(folder: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
    command += ["ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=bench"]
    command += ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"]
    subprocess.run(command, check=True, capture_output=True)


def compare(options: argparse.Namespace, tls_folder: str) -> dict[str, list[dict]]:
    spaces = options.netns or [None, None]
    prefixes = tuple(["ip", "netns", "exec", each] if each else [] for each in spaces)
    served = Side(prefixes[0], "serve", "--bind", options.bind, "--tls-folder", tls_folder)
    ports = served.read()
    words = ["--bind", options.bind, "--ports", json.dumps(ports), "--tls-folder", tls_folder]
    asker = Side(prefixes[1], "ask", *words)
    rows: dict[str, list[dict]] = {}
    try:
        for kind in ("plain", "tls") if options.tls else ("plain",):
            check = {"what": kind, "batch": 16, "depth": 4, "seconds": 0.2, "check": True}
            asker.ask(check)
        turns = turns_of(options, served, asker, prefixes)
        for number in range(options.rounds):
            for name, turn in turns.items():
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                rows.setdefault(name, []).append(turn())
    finally:
        asker.end()
        served.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("compare", "serve", "ask"), default="compare")
    parser.add_argument("--bind", default="127.0.0.1", help="the serving side's address")
    parser.add_argument("--netns", nargs=2, metavar=("SERVER", "ASKER"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="one round of half a second each")
    parser.add_argument("--tls", action="store_true", help="also in TLS (needs openssl)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ports", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--tls-folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode == "serve":
        serve(options.bind, options.tls_folder)
    elif options.mode == "ask":
        ask(options.bind, options.ports, options.tls_folder)
    else:
        if options.quick:
            options.rounds, options.seconds = 1, 0.5
        with tempfile.TemporaryDirectory() as folder:
            if options.tls:
                make_certificate(folder)
            rows = compare(options, folder if options.tls else "")
        report(rows)
        if options.json:
            options.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}))


if __name__ == "__main__":
    main()
