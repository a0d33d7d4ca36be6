"""How a piece of advice is followed: its settings become flags of the job, or another site."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.planted.data import SIDE, Sets
from benchmarks.planted.site import Site

FLAGS = {
    "images": {
        "num_workers",
        "prefetch_factor",
        "threads_per_worker",
        "async_checkpoint",
        "checkpoint_every",
    },
    "ranks": {
        "num_workers",
        "prefetch_factor",
        "rebalance_shards",
        "overlap_communication",
        "wire_dtype",
    },
    "rows": {"num_workers", "cache_bytes"},
    "documents": {"num_workers", "workers"},
    "towers": {"num_workers", "prefetch_factor", "compile_step"},
}
"""Settings that are flags of each job. `batch_size` is one too, for all of them."""


def followed(site: Site, settings: Mapping[str, Any], sets: Sets) -> Site | None:
    """Return the site with the settings; None where one of them cannot be carried out here."""
    if not settings:
        return None
    for name, value in settings.items():
        changed = CHANGES[name](site, value, sets) if name in CHANGES else None
        if changed is None and (name in FLAGS[site.script] or name == "batch_size"):
            changed = _with(site, {name: value})
        if changed is None:
            return None
        site = changed
    return site


def _with(site: Site, flags: Mapping[str, Any]) -> Site:
    return replace(site, flags={**site.flags, **flags})


def _packed(site: Site, value: Any, sets: Sets) -> Site | None:
    if site.script != "images" or site.data is None:
        return None
    return _with(replace(site, data=sets.shards(site.data)), {"pack_files": True})


def _smaller(site: Site, value: Any, sets: Sets) -> Site | None:
    if site.script != "images" or site.data is None:
        return None
    side = int(site.flags.get("side", SIDE))
    return replace(site, data=sets.smaller(site.data, float(value), side))


def _warm(site: Site, value: Any, sets: Sets) -> Site | None:
    """Read all files before the job starts; where pages do not stay, that gains nothing."""
    return replace(site, page_cache="warm") if site.page_cache == "cold" else site


def _cached(site: Site, value: Any, sets: Sets) -> Site | None:
    if site.script == "rows":
        flags = {"cache_folder": "SCRATCH/cache", "cache_bytes": int(value)}
        return _with(site, flags)
    if site.store is not None:
        return _with(site, {"cache_folder": "SCRATCH/cache"})
    # A copy in memory: no disk is read, and nobody drops its pages.
    return replace(site, disk_bytes_s=0, disk_reads_s=0, page_cache="warm")


def _faster_store(site: Site, value: Any, sets: Sets) -> Site | None:
    if site.store is not None:
        return replace(site, store=replace(site.store, bandwidth_bytes_s=float(value)))
    if site.disk_bytes_s:
        return replace(site, disk_bytes_s=int(value))
    return None


def _other_node(site: Site, value: Any, sets: Sets) -> Site | None:
    times = site.flags.get("step_ms")
    return _with(site, {"step_ms": min(times)}) if isinstance(times, tuple) else None


CHANGES: dict[str, Callable[[Site, Any, Sets], Site | None]] = {
    "pack_files": _packed,
    "decode_scale": _smaller,
    "warm_cache": _warm,
    "cache_bytes": _cached,
    "store_bandwidth": _faster_store,
    "replace_rank": _other_node,
}
"""Settings that are more than a flag: other files, another store, another node."""
