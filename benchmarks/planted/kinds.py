"""Fifteen bottlenecks and a healthy job, each planted with parameters that are drawn at random.

A kind returns two sites: `planted` has the bottleneck, `clean` is the same job without it.
Strengths are drawn so that the planted one costs at least a fifth of the throughput; what it costs
is measured by running both. Work on the CPU is calibrated first, so that a case is the same on
other machines.
"""

import os
import tempfile
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import torch
from testkit.shaper import Fixed, Shape

from benchmarks.planted.data import SIDE, Sets, decoded, decoded_grey, jpeg_of, size_bytes
from benchmarks.planted.site import Site

COLLECTIVE_MS = 6
"""A step's collectives of a small model and the hand-over of its batch, as found here."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A planted bottleneck."""

    kind: str
    """The word that a verdict should use."""
    parameters: Mapping[str, Any]
    """What was drawn."""
    planted: Site
    clean: Site


Plant = Callable[[Random, Sets], Case]
KINDS: dict[str, Plant] = {}


def kind(name: str) -> Callable[[Callable[..., tuple[dict, Site, dict]]], Plant]:
    """Register a kind; its function returns what was drawn, the planted site, and what to undo."""

    def registered(draw: Callable[..., tuple[dict, Site, dict]]) -> Plant:
        def plant(rng: Random, sets: Sets) -> Case:
            parameters, planted, undo = draw(rng, sets)
            flags = {**planted.flags, **undo.pop("flags", {})}
            clean = replace(planted, flags=flags, **undo)
            return Case(kind=name, parameters=parameters, planted=planted, clean=clean)

        KINDS[name] = plant
        return plant

    return registered


@cache
def decode_s(side: int) -> float:
    """Return how long this machine takes for an image of `jobs.images` when it is not disturbed."""
    data = jpeg_of(0, side)
    return min(timeit.repeat(lambda: decoded(data, SIDE), number=1, repeat=50))


@cache
def decode_grey_s(side: int) -> float:
    """Return the same for an image of `jobs.ranks`."""
    data = jpeg_of(0, side)
    return min(timeit.repeat(lambda: decoded_grey(data), number=1, repeat=20))


@cache
def save_s() -> float:
    """Return how long saving a megabyte of state takes."""
    state = {"weights": torch.zeros(100 * 2**18)}
    with tempfile.NamedTemporaryFile() as file:
        return min(timeit.repeat(lambda: torch.save(state, file.name), number=1, repeat=3)) / 100


@cache
def round_s() -> float:
    """Return how long tokenizing in `jobs.documents` takes for one byte."""
    from benchmarks.planted.jobs.documents import Documents

    documents = Documents(1, 1000)
    return min(timeit.repeat(lambda: documents[0], number=1, repeat=20)) / 1000


def image_bytes(side: int) -> int:
    return len(jpeg_of(0, side))


@kind("slow-store")
def slow_store(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    slowness, step_ms = rng.uniform(1.6, 3.0), rng.uniform(15, 25)
    loader = rng.choice(["penstock", "torch"])
    if loader == "penstock":
        # Long enough that what is read ahead before the first step does not count.
        script, data, batch_bytes = "rows", sets.array(640, 100_000), 8 * 100_000
        flags = {"batch_size": 8, "epochs": 3}
    else:
        script, data, batch_bytes = "images", sets.files(512, 128), 16 * image_bytes(128)
        flags = {"batch_size": 16, "epochs": 2, "num_workers": 2}
    rate = batch_bytes / (step_ms / 1000) / slowness
    site = Site(
        script=script,
        data=data,
        flags={**flags, "step_ms": round(step_ms, 1)},
        store=Shape(latency=Fixed(0.002), bandwidth_bytes_s=rate),
    )
    drawn = {"loader": loader, "MB/s": rate / 1e6, "slowness": slowness}
    return drawn, site, {"store": Shape(latency=Fixed(0.002))}


@kind("too-few-workers")
def too_few_workers(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    side, workers = rng.choice([256, 320, 384]), rng.choice([0, 1])
    batch_s = 16 * decode_s(side)
    slowness = rng.uniform(1.5, 1.8) if workers else rng.uniform(1.0, 1.5)
    flags = {"num_workers": workers, "step_ms": round(1000 * batch_s / slowness, 1), "epochs": 3}
    site = Site(script="images", data=sets.files(768, side), flags=flags)
    return (
        {"side": side, "workers": workers, "slowness": slowness},
        site,
        {"flags": {"num_workers": 2}},
    )


@kind("heavy-decode")
def heavy_decode(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    side, slowness = rng.choice([384, 448, 512]), rng.uniform(1.6, 2.6)
    step_ms = round(1000 * 16 * decode_s(side) / 2 / slowness, 1)
    flags = {"num_workers": 2, "step_ms": step_ms, "epochs": 2}
    site = Site(script="images", data=sets.files(768, side), flags=flags)
    return {"side": side, "slowness": slowness}, site, {"data": sets.files(768, 128)}


@kind("tiny-files")
def tiny_files(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    side, reads_s, slowness = (
        rng.choice([32, 48, 64]),
        rng.randint(500, 1000),
        rng.uniform(1.6, 2.5),
    )
    files = sets.files(768, side)
    step_ms = round(1000 * 32 / reads_s / slowness, 1)
    flags = {"batch_size": 32, "step_ms": step_ms, "epochs": 4, "side": 32}
    site = Site(script="images", data=files, flags=flags, disk_reads_s=reads_s, page_cache="none")
    drawn = {"bytes": image_bytes(side), "reads/s": reads_s, "slowness": slowness}
    return drawn, site, {"data": sets.shards(files), "flags": {"pack_files": True}}


@kind("straggler-rank")
def straggler_rank(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    step_ms, slowness, slow = rng.uniform(20, 30), rng.uniform(1.5, 2.2), rng.randrange(2)
    times = [round(step_ms, 1)] * 2
    times[slow] = round(step_ms * slowness, 1)
    site = Site(
        script="ranks",
        data=sets.files(512, 64),
        ranks=2,
        flags={"step_ms": tuple(times), "epochs": 3, "layers": 1},
    )
    return {"rank": slow, "slowness": slowness}, site, {"flags": {"step_ms": round(step_ms, 1)}}


@kind("slow-disk")
def slow_disk(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    side, slowness, step_ms = (
        rng.choice([176, 192, 208]),
        rng.uniform(1.8, 3.0),
        rng.uniform(15, 25),
    )
    rate = int(16 * image_bytes(side) / (step_ms / 1000) / slowness)
    site = Site(
        script="images",
        data=sets.files(768, side),
        flags={"step_ms": round(step_ms, 1), "epochs": 2, "side": 64},
        disk_bytes_s=rate,
        page_cache="none",
    )
    return {"MB/s": rate / 1e6, "slowness": slowness}, site, {"disk_bytes_s": 0}


@kind("compute-bound")
def compute_bound(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    data = sets.files(512, 64)
    if rng.random() < 0.5:
        flags, undo = {"step_ms": round(rng.uniform(30, 60), 1)}, {"step_ms": 15}
    else:
        flags, undo = {"matmul": rng.choice([1024, 1280, 1536])}, {"matmul": 512}
    site = Site(script="images", data=data, flags={**flags, "num_workers": 1, "epochs": 3})
    return flags, site, {"flags": undo}


@kind("communication-bound")
def communication_bound(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    width, slowness, step_ms = rng.choice([512, 768]), rng.uniform(0.8, 2.0), rng.uniform(20, 30)
    # Each of two ranks sends as many bytes as there are gradients, all over one interface.
    rate = int(8 * 2 * 4 * width**2 * 4 / (slowness * step_ms / 1000))
    site = Site(
        script="ranks",
        data=sets.files(512, 64),
        ranks=2,
        flags={"step_ms": round(step_ms, 1), "width": width, "layers": 4, "epochs": 2},
        network_bits_s=rate,
    )
    drawn = {"Gbit/s": rate / 1e9, "of compute": slowness}
    return drawn, site, {"flags": {"width": 64}, "network_bits_s": 0}


@kind("cache-too-small")
def cache_too_small(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    share, slowness, step_ms = rng.uniform(0.75, 0.92), rng.uniform(1.6, 2.5), rng.uniform(10, 15)
    data = sets.array(320, 100_000)
    epoch_s = 40 * step_ms / 1000
    rate = (1 - share) * size_bytes(data) / epoch_s / slowness
    flags = {"step_ms": round(step_ms, 1), "epochs": 4, "cache_folder": "SCRATCH/cache"}
    site = Site(
        script="rows",
        data=data,
        flags={**flags, "cache_bytes": int(share * size_bytes(data))},
        store=Shape(latency=Fixed(0.002), bandwidth_bytes_s=rate),
        has_filled_cache=True,
    )
    drawn = {"cache": share, "MB/s": rate / 1e6, "slowness": slowness}
    return drawn, site, {"flags": {"cache_bytes": int(1.2 * size_bytes(data))}}


@kind("skewed-shards")
def skewed_shards(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    side, slowness = rng.choice([288, 320]), rng.uniform(1.6, 1.9)
    # Large batches: with few samples, batches of the balanced job would differ as well.
    batch_size = 32
    step_ms = round(1000 * batch_size * decode_grey_s(side) / slowness - COLLECTIVE_MS, 1)
    site = Site(
        script="ranks",
        data=sets.files(2048, 32, large=side),
        ranks=2,
        flags={"batch_size": batch_size, "step_ms": step_ms, "epochs": 3, "layers": 1},
    )
    drawn = {"sides": f"{side} and 32", "slowness": slowness}
    return drawn, site, {"flags": {"rebalance_shards": True}}


@kind("cold-page-cache")
def cold_page_cache(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    slowness, step_ms, epochs = rng.uniform(2.5, 4.0), rng.uniform(12, 18), rng.choice([2, 3])
    rate = int(16 * image_bytes(192) / (step_ms / 1000) / slowness)
    site = Site(
        script="images",
        data=sets.files(768, 192),
        flags={"step_ms": round(step_ms, 1), "epochs": epochs, "side": 64},
        disk_bytes_s=rate,
        page_cache="cold",
    )
    drawn = {"MB/s": rate / 1e6, "slowness": slowness, "epochs": epochs}
    return drawn, site, {"page_cache": "warm"}


@kind("checkpoint-interference")
def checkpoint_interference(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    size_mb, step_ms = rng.randint(100, 200), rng.uniform(15, 20)
    # A save takes less than the steps between two of them, so it can go on beside them.
    every = max(2, int(size_mb * save_s() / (step_ms / 1000) / rng.uniform(0.5, 0.8)))
    flags = {"step_ms": round(step_ms, 1), "num_workers": 1, "epochs": 3}
    saving = {"checkpoint": "SCRATCH/last.pt", "checkpoint_every": every, "checkpoint_mb": size_mb}
    site = Site(script="images", data=sets.files(512, 64), flags={**flags, **saving})
    return {"every": every, "MB": size_mb}, site, {"flags": {"checkpoint": False}}


@kind("interpreter-lock")
def interpreter_lock(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    kernels, step_ms, load = rng.randint(20, 40), rng.uniform(10, 20), rng.uniform(0.5, 0.9)
    rounds = int(load * step_ms / 1000 / 8 / round_s())
    flags = {"kernels": kernels, "step_ms": round(step_ms, 1), "rounds": rounds}
    site = Site(script="documents", flags={**flags, "workers": "threads"})
    drawn = {"kernels": kernels, "rounds": rounds, "load": load}
    return drawn, site, {"flags": {"workers": "processes"}}


@kind("oversubscribed-cores")
def oversubscribed_cores(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    # As many threads in each worker as there are cores: what libraries take when nobody says.
    workers, threads = rng.choice([4, 6, 8]), len(os.sched_getaffinity(0))
    flags = {"num_workers": workers, "threads_per_worker": threads, "blur": 5, "matmul": 768}
    site = Site(
        script="images",
        data=sets.files(512, 128),
        flags={**flags, "side": 128, "epochs": 1},
        # As many clusters set it: a thread that waits for the others of its process keeps its core.
        environment={"OMP_WAIT_POLICY": "ACTIVE"},
    )
    undo = {"num_workers": 2, "threads_per_worker": 1}
    return {"workers": workers, "threads": threads}, site, {"flags": undo}


@kind("launch-bound")
def launch_bound(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    features, width = rng.choice([100, 200, 300]), rng.choice([4, 8])
    flags = {"features": features, "width": width, "epochs": 2, "step_ms": 2}
    site = Site(script="towers", flags=flags)
    return {"features": features, "width": width}, site, {"flags": {"compile_step": True}}


@kind("healthy")
def healthy(rng: Random, sets: Sets) -> tuple[dict, Site, dict]:
    step_ms = round(1000 * 16 * decode_s(128) * rng.uniform(2.0, 4.0), 1)
    site = Site(script="images", data=sets.files(512, 128), flags={"step_ms": step_ms, "epochs": 3})
    return {"step ms": step_ms}, site, {}
