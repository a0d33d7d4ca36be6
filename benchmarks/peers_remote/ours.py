"""Penstock: the tar shards as they lie, one loader for all epochs, one tier."""

import os
from collections.abc import Generator

import penstock
from benchmarks.peers.ours import BATCH, epoch_of
from benchmarks.peers_remote import LOOK_AHEAD_BYTES, Opened
from benchmarks.remote import WORK
from benchmarks.works import SEED


def open_dataset(task: dict) -> penstock.Dataset:
    """Open the set; where its index is missing, that reads the headers of all members."""
    os.environ["PENSTOCK_CACHE"] = task["index"]
    store = penstock.StoreOptions(endpoint=task["endpoint"], anonymous=True)
    return penstock.open(task["uri"], store=store)


def open_loader(task: dict) -> Opened:
    loader = penstock.Loader(
        open_dataset(task),
        batch_size=WORK.batch_size,
        epochs=task["epochs"],
        seed=SEED,
        tiers=tiers_of(task),
        look_ahead=LOOK_AHEAD_BYTES,
    )
    batches = batches_of(loader)

    def close() -> dict:
        batches.close()
        loader.close()
        stats = loader.stats()
        return {"store_bytes": stats.store_bytes, "bound_bytes": stats.bound_bytes}

    return Opened(start=lambda _: epoch_of(batches, WORK), close=close)


def tiers_of(task: dict) -> list[penstock.Memory | penstock.Disk]:
    size = task["limit_bytes"]
    if not size:
        return []
    if task["variant"] == "memory":
        return [penstock.Memory(size, folder=task["memory"])]
    return [penstock.Disk(task["cache"], size)]


def batches_of(loader: penstock.Loader) -> Generator:
    """Yield batches; nothing is fetched before the first one is asked for."""
    yield from map(BATCH[WORK.name], loader)
