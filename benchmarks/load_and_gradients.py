"""What if batches come over the wire that gradients need? Who loads and who reduces, and in order.

    python -m benchmarks.load_and_gradients [--rounds 5] [--rate 1gbit] [--batch-mb 8]
        [--device-ms 12] [--quick] [--json FILE]

Two ranks behind links of a rate, and a third host with a file that they read by HTTP, in random
rows. Six layers of 1024 x 1024 (25 MB of gradients). With `--device-ms` a layer takes so long
forward and twice that backward while the processor is free, as if a device computed; with 0 nothing
is computed but the products of a few rows. Everyone takes turns; a turn begins with steps that are
not timed, so that what was fetched before it does not count. Times are the slower rank's, `in` and
`out` are what the first rank's interface has counted for one step, `waited` is what of fetching and
decoding was not hidden: the time of a step in which the first rank waited for its batch. What else
loads cost is communication that they slow down. The device is a stand-in: it sleeps.

    DataLoader + DDP     two workers that keep their connections, four batches ahead
    Loader + attach      Penstock's
    ..., shallow         two batches ahead, and no order between loads and communication
    ..., wire            the same, and loads make way for communication (`step.loads.shared_wire`)
    no loads             the same batch again and again: the limit for whoever loads

Every row read is compared with what was written, and weights after the same steps with DDP's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from testkit.network import Link, Network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

import penstock
import penstock.step as ps
from benchmarks.compare import conditions
from penstock.step.loads.shared_wire import Wire

QUESTION = __doc__.splitlines()[0]
ROOT = Path(__file__).parents[1]
WIDTH, LAYERS, ROWS = 1024, 6, 32
NUM_SAMPLES = 1024
PORT = 8080
RUN_S = 900
BASELINE = "DataLoader + DDP"
DEEP = 4
"""Batches that whoever does not order loads may have ahead."""


# -- data --------------------------------------------------------------------------------------


def row(number: int, parts: int) -> np.ndarray:
    """Return a sample: features that are spread over its parts."""
    base = np.random.default_rng(number).standard_normal(WIDTH, np.float32)
    return base + np.arange(parts, dtype=np.float32)[:, None]


def check_rows(data: torch.Tensor) -> torch.Tensor:
    """Return a batch after a look at it: its last part tells the first."""
    assert data.dtype == torch.float32
    off = (data[:, -1] - data[:, 0] - (data.shape[1] - 1)).abs().max().item()
    assert off < 1e-3, f"rows are off by {off}"
    return data


class Files(BaseHTTPRequestHandler):
    """One file, in ranges; the kernel copies it to the socket."""

    protocol_version = "HTTP/1.1"
    file = Path()

    def do_HEAD(self) -> None:
        if self.path != f"/{self.file.name}":
            self._answer(0, 0, 404)
            return
        self._answer(0, self.file.stat().st_size, 200)

    def do_GET(self) -> None:
        if self.path != f"/{self.file.name}":
            self._answer(0, 0, 404)
            return
        size = self.file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        stop = min(size, int(asked[2]) + 1) if asked and asked[2] else size
        self._answer(first, stop, 206 if asked else 200)
        with self.file.open("rb") as file:
            while first < stop:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, stop - first)

    def _answer(self, first: int, stop: int, status: int) -> None:
        size = self.file.stat().st_size
        self.send_response(status)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{size}")
        self.end_headers()
        self.wfile.flush()

    def log_message(self, *_: Any) -> None: ...


def serve(path: Path) -> None:
    Files.file = path
    ThreadingHTTPServer(("0.0.0.0", PORT), Files).serve_forever()


class Rows(Dataset):
    """The baseline's: each worker has a connection, a row is a range."""

    def __init__(self, host: str, parts: int) -> None:
        self._host, self._shape = host, (parts, WIDTH)
        self._connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, PORT)
        size = 4 * self._shape[0] * self._shape[1]
        first = 128 + number * size
        asked = {"Range": f"bytes={first}-{first + size - 1}"}
        self._connection.request("GET", "/data.npy", headers=asked)
        data = bytearray(self._connection.getresponse().read())
        return torch.frombuffer(data, dtype=torch.float32).view(self._shape)


def torch_loader(host: str, parts: int) -> Iterator[torch.Tensor]:
    sampler = RandomSampler(range(NUM_SAMPLES), replacement=True, num_samples=10**9)
    loader = DataLoader(
        Rows(host, parts), ROWS, sampler=sampler, num_workers=2, prefetch_factor=DEEP // 2
    )
    return iter(loader)


def our_loader(host: str, parts: int, num_batches: int) -> Iterable[Any]:
    dataset = penstock.open(f"http://{host}:{PORT}/data.npy")
    size_bytes = 4 * ROWS * parts * WIDTH
    return penstock.Loader(
        dataset, batch_size=ROWS, epochs=None, drop_last=True, look_ahead=num_batches * size_bytes
    )


def fields(batches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for batch in batches:
        yield batch["data"]


# -- training ----------------------------------------------------------------------------------


class Device(torch.autograd.Function):
    """Takes as long as a device would, and leaves values alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return dy, None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        return Device.apply(y, self._seconds) if self._seconds else y


def make_model(seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(seconds) for _ in range(LAYERS)))


class Trained:
    """A model, what makes it data-parallel, and where its batches come from."""

    def __init__(
        self,
        batches: Iterator[torch.Tensor],
        seconds: float,
        *,
        bucket_mb: float | None = None,
        over: Wire | None = None,
    ) -> None:
        self.waited_s = 0.0
        self.plain = make_model(seconds)
        self.over = over
        self._batches = batches
        self._optimizer = torch.optim.SGD(self.plain.parameters(), lr=1e-3)
        self._model: nn.Module = self.plain
        self.finish: Callable[[], None] = lambda: None
        if bucket_mb is not None:
            self._model = DistributedDataParallel(
                self.plain, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
            )
        else:
            groups = ps.Groups(ps.mesh(dp=distributed.get_world_size()), over=over)
            self.finish = ps.attach(self.plain, self._optimizer, groups).synchronize

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            batch = next(self._batches)
            self.waited_s += time.perf_counter() - begin_s
            x = check_rows(batch).mean(1)
            self._optimizer.zero_grad()
            (self._model(x) - 1.0).square().mean().backward()
            self._optimizer.step()

    def weights(self) -> torch.Tensor:
        self.finish()
        return torch.cat([param.detach().flatten() for param in self.plain.parameters()])


def everyone(options: argparse.Namespace) -> dict[str, Callable[[], Trained]]:
    host, parts, seconds = options.store, parts_of(options), options.device_ms / 1e3
    loader = lambda deep: our_loader(host, parts, deep)  # noqa: E731
    same = torch.from_numpy(np.stack([row(number, parts) for number in range(ROWS)]))

    def ahead(*, is_ordered: bool) -> Trained:
        wire, other = Wire(), Wire()
        batches = fields(wire.ahead(loader(1)))
        return Trained(batches, seconds, over=wire if is_ordered else other)

    return {
        BASELINE: lambda: Trained(torch_loader(host, parts), seconds, bucket_mb=25),
        "DataLoader + DDP, buckets of 4 MB": lambda: Trained(
            torch_loader(host, parts), seconds, bucket_mb=4
        ),
        "Loader + DDP": lambda: Trained(fields(loader(DEEP)), seconds, bucket_mb=25),
        "Loader + attach": lambda: Trained(fields(loader(DEEP)), seconds),
        "Loader + attach, shallow": lambda: ahead(is_ordered=False),
        "Loader + attach, wire": lambda: ahead(is_ordered=True),
        "attach, no loads": lambda: Trained(iter(lambda: same, None), seconds),
    }


def parts_of(options: argparse.Namespace) -> int:
    return max(2, round(options.batch_mb * 1e6 / (4 * ROWS * WIDTH)))


# -- a rank ------------------------------------------------------------------------------------


def interface_bytes() -> tuple[int, int]:
    """Return what this host's interface has received and sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[0]), int(counts.split()[8])
    raise AssertionError("no eth0 here")


def settle() -> None:
    """Return when nothing comes any more: whoever had its turn may still load ahead."""
    before = -1
    while (now := interface_bytes()[0]) - before > 20_000:
        before = now
        time.sleep(0.1)
    distributed.barrier()


def measure(trained: Trained, options: argparse.Namespace) -> dict[str, float]:
    settle()
    trained.run(options.warm)
    held = trained.over.num_held if trained.over else 0
    waited_s = trained.waited_s
    before, cpu_s = interface_bytes(), time.process_time()
    begin_s = time.perf_counter()
    trained.run(options.steps)
    taken = torch.tensor((time.perf_counter() - begin_s) / options.steps, dtype=torch.float64)
    cpu_s = time.process_time() - cpu_s
    after = interface_bytes()
    waited_s = trained.waited_s - waited_s
    trained.finish()
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    held = (trained.over.num_held if trained.over else 0) - held
    return {
        "s": taken.item(),
        "in_bytes": (after[0] - before[0]) / options.steps,
        "out_bytes": (after[1] - before[1]) / options.steps,
        "cpu_s": cpu_s / options.steps,
        "held": held / options.steps,
        "waited_s": waited_s / options.steps,
    }


def check_values(options: argparse.Namespace) -> None:
    """Compare weights after the same steps, with and without DDP."""
    parts = parts_of(options)
    draws = torch.Generator().manual_seed(distributed.get_rank())
    base = torch.randn(4, ROWS, 1, WIDTH, generator=draws)
    batches = list(base + torch.arange(parts, dtype=torch.float32)[:, None])
    theirs = Trained(iter(batches), 0.0, bucket_mb=25)
    ours = Trained(Wire().ahead(batches), 0.0, over=Wire())
    for each in (theirs, ours):
        each.run(len(batches))
    off = (theirs.weights() - ours.weights()).abs().max().item()
    assert off <= 1e-6, f"weights are off by {off} from DDP's"


def be_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    check_values(options)
    trained = {name: make() for name, make in everyone(options).items()}
    for each in trained.values():
        each.run(3)
        each.finish()
    rows = []
    names = list(trained)
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = measure(trained[name], options)
            rows.append({"way": name, "round": number} | result)
    for name, each in trained.items():
        mine = each.weights().double().sum().view(1)
        all_sums = [torch.zeros_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(all_sums, mine)
        assert all(torch.equal(one, mine) for one in all_sums), f"{name}: ranks differ"
    if distributed.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    distributed.barrier()
    # Workers and threads may still be at it; there is nothing left to lose.
    os._exit(0)


# -- all ---------------------------------------------------------------------------------------


def launch(options: argparse.Namespace) -> list[dict]:
    arguments = [a for a in sys.argv[1:] if a != "compare"]
    hosts = {"r0": Link(rate=options.rate), "r1": Link(rate=options.rate), "store": Link()}
    me = [sys.executable, "-m", "benchmarks.load_and_gradients"]
    with tempfile.TemporaryDirectory() as folder, Network(hosts) as network:
        path = Path(folder) / "data.npy"
        parts = parts_of(options)
        np.save(path, np.stack([row(number, parts) for number in range(NUM_SAMPLES)]))
        store, first = network.host("store"), network.host("r0")
        store.popen([*me, "store", "--store", str(path)], cwd=ROOT)
        env = {"MASTER_ADDR": first.address, "MASTER_PORT": "29513", "WORLD_SIZE": "2"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = [*me, "rank", *arguments, "--store", store.address]
        ranks = [
            network.host(f"r{number}").popen(
                command,
                env=env | {"RANK": str(number)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        said = [each.communicate(timeout=RUN_S)[0] for each in ranks]
        assert not any(each.returncode for each in ranks), "a rank has failed"
    return json.loads(said[0].splitlines()[-1])


def text(rows: list[dict]) -> str:
    columns = "step ms | min..max | times faster | waited ms | in MB | out MB"
    lines = [f"| way | {columns} | CPU ms | held |", "|---|" + 8 * "---:|"]
    by_way: dict[str, list[dict]] = {}
    for each in sorted(rows, key=lambda each: each["round"]):
        by_way.setdefault(each["way"], []).append(each)
    base = [each["s"] for each in by_way[BASELINE]]
    for name in dict.fromkeys(each["way"] for each in rows if each["round"] == 0):
        mine = by_way[name]
        times = [each["s"] for each in mine]
        cells = [
            f"{1e3 * median(times):.1f}",
            f"{1e3 * min(times):.1f}..{1e3 * max(times):.1f}",
            f"{median(a / b for a, b in zip(base, times, strict=True)):.2f}",
            f"{1e3 * median(each['waited_s'] for each in mine):.1f}",
            f"{median(each['in_bytes'] for each in mine) / 1e6:.1f}",
            f"{median(each['out_bytes'] for each in mine) / 1e6:.1f}",
            f"{1e3 * median(each['cpu_s'] for each in mine):.1f}",
            f"{median(each['held'] for each in mine):.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("mode", nargs="?", choices=("compare", "rank", "store"), default="compare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn, timed")
    parser.add_argument("--warm", type=int, default=5, help="of a turn before those")
    parser.add_argument("--rate", default="1gbit", help="of the ranks' links")
    parser.add_argument("--batch-mb", type=float, default=8.0)
    parser.add_argument("--device-ms", type=float, default=12.0, help="a layer's forward")
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 3, 6
    if options.mode == "store":
        serve(Path(options.store))
    if options.mode == "rank":
        be_rank(options)
    rows = launch(options)
    print(f"{QUESTION}\n{conditions()}")
    print(
        f"links {options.rate}, batches of {options.batch_mb:g} MB, {options.device_ms:g} ms a "
        f"layer, {options.rounds} rounds of {options.steps} steps\n"
    )
    print(text(rows))
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}))


if __name__ == "__main__":
    main()
