"""Facts that a loader records beside the rows of its run: parameters and final counts."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import datasets_of
from penstock.engine.options import LoaderOptions
from penstock.engine.stats import Stats
from penstock.engine.stream import stream_of
from penstock.loader.batch import record_copies
from penstock.loader.choice import is_worker
from penstock.loader.iteration import IterationRecording
from penstock.order.importance import Importance
from penstock.trace import Kind, Recorder, recorder_of
from penstock.trace.host import system_facts
from penstock.world import World

_SAMPLES_LOOKED_AT = 10_000
"""Samples of each part whose sizes are looked at."""
_VERSIONS = ("penstock", "torch", "numpy")
_FINAL_COUNTS = (
    *("samples", "batches", "epochs", "stall_s", "hand_over_s", "cpu_here_s", "decode_s"),
    *("elapsed_s", "sent_bytes", "store_bytes", "tier_bytes", "peer_bytes", "bound_bytes"),
)


def recorder_for(options: LoaderOptions, world: World) -> Recorder | None:
    """Return the recorder of a loader in this process, if the loader is traced."""
    if options.trace is None:
        return None
    role = "worker" if is_worker() else "train"
    recorder = recorder_of(options.trace, role=role, rank=world.rank)
    for dataset in datasets_of(options.dataset):
        begin_ns, end_ns = dataset.opened_ns
        if end_ns:
            dataset.opened_ns = (0, 0)  # Only once: other loaders use the same opened data set.
            recorder.span(
                Kind.INDEX,
                begin_ns,
                end_ns,
                object_id=recorder.name(dataset.uri),
                source_id=recorder.name(dataset.store.source),
                count=len(dataset),
            )
    if role == "train":
        record_copies(recorder)
    return recorder


_NAMES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Names of the loaders of this process."""
_NUMBERS = itertools.count()
"""Numbers of loaders, in the order of their first iterations."""


def recorded_of(loader: Any, recorder: Recorder, *, is_loop: bool) -> IterationRecording:
    """Return how an iteration is recorded, under a name that no other loader has."""
    if loader not in _NAMES:
        uris = ", ".join(dataset.uri for dataset in datasets_of(loader.dataset))
        _NAMES[loader] = f"loader {next(_NUMBERS)} ({uris})"
    return IterationRecording(
        recorder=recorder,
        ended=partial(_at_end, weakref.WeakMethod(loader.stats), recorder),
        is_loop=is_loop,
        object_id=recorder.name(_NAMES[loader]),
    )


def record_start(recorder: Recorder, options: LoaderOptions, world: World, workers: str) -> None:
    """Record the parameters of a run, as its first iteration begins."""
    data = next((d for d in datasets_of(options.dataset) if d.store.source == "folder"), None)
    recorder.facts(
        {
            **_application(options, world),
            **_dataset(options.dataset),
            **system_facts(None if data is None else data.uri.removeprefix("file://")),
            "workers": workers,
        }
    )


def record_end(recorder: Recorder, stats: Stats) -> None:
    """Record the counts so far."""
    recorder.facts(
        {
            "final_stats": {
                "sources": {name: asdict(source) for name, source in stats.sources.items()},
                **{name: getattr(stats, name) for name in _FINAL_COUNTS},
                "tiers": [asdict(tier) for tier in stats.tiers],
                "peers": [asdict(peer) for peer in stats.peers],
                "events": list(stats.events),
            },
            "bound_bytes": stats.bound_bytes,
        }
    )
    recorder.flush()


def _at_end(stats_of: weakref.WeakMethod[Callable[[], Stats]], recorder: Recorder) -> None:
    """Record the counts of a loader, if it still exists."""
    stats = stats_of()
    if stats is not None:
        record_end(recorder, stats())


def _application(options: LoaderOptions, world: World) -> dict[str, Any]:
    shuffle = options.shuffle
    facts = {
        "loader": "penstock",
        "batch_size": options.batch_size,
        "global_batch_size": stream_of(options, world).global_batch_size,
        "epochs": options.epochs,
        "world_size": world.num_ranks,
        "ranks_per_node": -(-world.num_ranks // world.num_nodes),
        "num_nodes": world.num_nodes,
        "num_workers": options.workers if isinstance(options.workers, int) else None,
        "shuffle": "importance" if isinstance(shuffle, Importance) else options.order.mode,
        "seed": options.seed,
        "drop_last": options.drop_last,
        "look_ahead_bytes": options.look_ahead_bytes,
        "peers": bool(options.peers),
        "assignment": options.assignment,
        "command": " ".join(sys.argv),
        "framework": {name: v for name in _VERSIONS if (v := _version(name)) is not None},
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["num_threads_torch"] = torch.get_num_threads()
        facts["device"] = _device(torch)
    return {name: value for name, value in facts.items() if value is not None}


def _version(name: str) -> str | None:
    found = getattr(sys.modules.get(name), "__version__", None)
    return None if found is None else str(found)


def _device(torch: Any) -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _dataset(dataset: Any) -> dict[str, Any]:
    several = datasets_of(dataset)
    sizes = np.concatenate([_sample_bytes(one) for one in several])
    return {
        "dataset_name": ", ".join(one.uri for one in several),
        "num_samples": sum(len(one) for one in several),
        "dataset_bytes": sum(one.size_bytes for one in several),
        "num_files": sum(table.num_objects for b in dataset.bound for table in b.part.tables),
        "format": ", ".join(dict.fromkeys(one.format for one in several)),
        "store": ", ".join(dict.fromkeys(one.store.source for one in several)),
        "fingerprint": dataset.fingerprint,
        "sample_bytes": {
            "mean": float(sizes.mean()),
            "p50": float(np.percentile(sizes, 50)),
            "p99": float(np.percentile(sizes, 99)),
            "sd": float(sizes.std()),
        },
    }


def _sample_bytes(dataset: Dataset) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return sizes of samples spread over a data set; in blocks, each sample's share."""
    found: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for bound in dataset.bound:
        num_samples = bound.part.num_samples
        if not num_samples:
            continue
        num_looked_at = min(num_samples, _SAMPLES_LOOKED_AT)
        ids = np.linspace(0, num_samples - 1, num_looked_at).astype(np.int64)
        if bound.by_block:
            total = sum(table.total_bytes() for table in bound.part.tables)
            found.append(np.full(num_looked_at, total / num_samples))
        else:
            lengths = [table.extents(ids).length for table in bound.part.tables]
            found.append(np.asarray(sum(lengths), np.float64))
    return np.concatenate(found) if found else np.zeros(1)
