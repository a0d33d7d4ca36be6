"""A traced training job with emulated compute, for `predict_runs`: torch's loader or Penstock's.

    python -m benchmarks.predict_job TASK.json

A step sleeps, so it needs no core; ranks wait for each other after each. The torch job reads one
object a sample over HTTP, or sleeps for as long as a store with a long tail would take.
"""

import http.client
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from benchmarks.predict_links import enter_namespace
from penstock.trace import Kind, Recorder, recorder_of
from penstock.trace.loop import LoopRecorder, ThreadTimes

TAIL_MEDIAN_S, TAIL_SIGMA = 0.004, 1.0
"""The store with a long tail: 1 % of its answers take ten times as long as half of them."""


def burn(seconds: float) -> None:
    """Use a core for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


class Objects:
    """A data set for torch: one request a sample."""

    def __init__(self, task: dict) -> None:
        self.task = task
        self._connection = None
        self._recorder: Recorder | None = None

    def __len__(self) -> int:
        return self.task["num_samples"]

    def begin(self, rank: int) -> None:
        """Open what a worker needs of its own."""
        self._num_made = 0
        self._recorder = Recorder(self.task["trace"], role="worker", rank=rank)
        self._times = ThreadTimes()

    def _read(self, index: int) -> bytes:
        if self.task["store"] == "tail":
            rng = random.Random(index)
            time.sleep(TAIL_MEDIAN_S * math.exp(TAIL_SIGMA * rng.gauss(0, 1)))
            return bytes(1000)
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.task["host"], self.task["port"])
        self._connection.request("GET", f"{self.task['path']}/{index:06}.bin")
        return self._connection.getresponse().read()

    def __getitem__(self, index: int) -> np.ndarray:
        begin_ns, before = time.perf_counter_ns(), self._times.now()
        data = self._read(index)
        burn(self.task["decode_s"])
        after = self._times.now()
        self._recorder.span(
            Kind.SAMPLE,
            begin_ns,
            time.perf_counter_ns(),
            size_bytes=len(data) if self.task["store"] != "tail" else 0,
            count=1,
            cpu_ns=after[0] - before[0],
            wait_ns=after[1] - before[1],
        )
        return np.frombuffer(data, np.uint8)

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        self._begin_ns, self._before = time.perf_counter_ns(), self._times.now()
        return [self[i] for i in indices]

    def _number(self) -> int:
        """Return which batch of the epoch this worker makes: they take turns."""
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._num_made += 1
        return first + (self._num_made - 1) * stride

    def collate(self, samples: list[np.ndarray]):
        import torch

        batch = torch.from_numpy(np.stack(samples))
        after = self._times.now()
        self._recorder.span(
            Kind.BATCH,
            self._begin_ns,
            time.perf_counter_ns(),
            size_bytes=batch.numel(),
            count=len(samples),
            step=self._number(),
            cpu_ns=after[0] - self._before[0],
            wait_ns=after[1] - self._before[1],
        )
        return batch


def torch_batches(task: dict, rank: int, epoch: int, ready: Callable[[], None]):
    """Yield the batches of an epoch, with rows of the loop's questions."""
    from torch.utils.data import DataLoader, DistributedSampler

    dataset = Objects(task)
    if not task["workers"]:
        dataset.begin(rank)
    sampler = DistributedSampler(dataset, num_ranks(task), rank, shuffle=True, seed=1)
    sampler.set_epoch(epoch)
    loader = DataLoader(
        dataset,
        batch_size=task["batch_size"],
        sampler=sampler,
        num_workers=task["workers"],
        prefetch_factor=task["prefetch_factor"] if task["workers"] else None,
        collate_fn=dataset.collate,
        worker_init_fn=lambda _: dataset.begin(rank),
        multiprocessing_context="fork" if task["workers"] else None,
    )
    loop = LoopRecorder(recorder_of(task["trace"], role="train", rank=rank))
    if epoch == 0:
        ready()
    # The first question begins before workers start, as in a run that is traced from outside.
    asked_ns = loop.asked()
    batches, step = iter(loader), 0
    while True:
        batch = next(batches, None)
        if batch is None:
            loop.ended()
            return
        loop.got(asked_ns, wait_ns=0, step=step, epoch=epoch, count=len(batch))
        step += 1
        yield batch
        asked_ns = loop.asked()


def penstock_batches(task: dict, rank: int, ready: Callable[[], None]):
    import penstock

    options = penstock.StoreOptions(**task["options"])
    dataset = penstock.open(task["uri"], store=options)
    world = penstock.World(rank=rank, num_ranks=num_ranks(task), num_nodes=task["nodes"])
    tiers = tiers_of(task, world.node)
    # Nodes without tiers have nothing for each other.
    meet = f"{task['tiers']}/meet" if tiers and world.num_nodes > 1 else False
    with penstock.Loader(
        dataset,
        batch_size=task["batch_size"],
        epochs=task["epochs"],
        tiers=tiers,
        world=world,
        peers=meet,
        output="numpy",
        transform=(lambda s: (burn(task["decode_s"]), s)[1]) if task["decode_s"] else None,
        workers=task["workers"],
        look_ahead=task["look_ahead"],
        trace=task["trace"],
    ) as loader:
        ready()
        yield from loader


def tiers_of(task: dict, node: int) -> list:
    """Return the tiers of a node; nodes of one machine keep them apart."""
    import penstock

    tiers: list = []
    if task["cache_bytes"]:
        memory = Path(task["memory"]) / f"node{node}"
        memory.mkdir(parents=True, exist_ok=True)
        tiers.append(penstock.Memory(int(task["cache_bytes"]), folder=memory))
    if task["disk_bytes"]:
        disk = Path(task["tiers"]) / f"node{node}"
        disk.mkdir(parents=True, exist_ok=True)
        tiers.append(penstock.Disk(disk, int(task["disk_bytes"])))
    return tiers


def num_ranks(task: dict) -> int:
    return task["nodes"] * task["ranks"]


def facts_of(task: dict) -> dict:
    facts = {
        "loader": task["loader"],
        "batch_size": task["batch_size"],
        "epochs": task["epochs"],
        "world_size": num_ranks(task),
        "ranks_per_node": task["ranks"],
        "prefetch_factor": task["prefetch_factor"],
        "num_samples": task["num_samples"],
        "sample_bytes": {"mean": task["sample_bytes"], "sd": task["sample_sd_bytes"]},
        "cores": len(os.sched_getaffinity(0)),
    }
    if task["loader"] == "torch":
        return facts | {"num_workers": task["workers"]}
    facts["look_ahead_bytes"] = task["look_ahead"]
    capacities = {"memory": int(task["cache_bytes"]), "disk": int(task["disk_bytes"])}
    tiers = [{"source": name, "capacity_bytes": size} for name, size in capacities.items()]
    return facts | {"tiers": tiers}


def train(task: dict, rank: int, barrier: Barrier | None) -> None:
    if task.get("namespaces"):
        enter_namespace(task["namespaces"][rank // task["ranks"]])
    recorder_of(task["trace"], role="train", rank=rank).facts(facts_of(task))
    # Ranks begin together, as they do after they have made their process group.
    ready = (lambda: None) if barrier is None else barrier.wait
    step_s = task["compute_s"] * task["batch_size"]
    if task["loader"] == "torch":
        epochs = [torch_batches(task, rank, epoch, ready) for epoch in range(task["epochs"])]
    else:
        epochs = [penstock_batches(task, rank, ready)]
    for _ in itertools.chain.from_iterable(epochs):
        time.sleep(step_s)
        if barrier is not None:
            barrier.wait()


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    if num_ranks(task) == 1:
        train(task, 0, None)
        return
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(num_ranks(task))
    ranks = [spawn.Process(target=train, args=(task, r, barrier)) for r in range(num_ranks(task))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    main()
