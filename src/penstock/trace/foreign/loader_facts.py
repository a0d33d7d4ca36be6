"""Facts of a loader of torch and its kind, for the report."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from typing import Any

_LOADERS = {
    "streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "datasets": "huggingface-datasets",
    "torchdata": "torchdata",
}
"""By the package that the data set or the loader comes from."""
_FRAMEWORKS = ("torch", "torchvision", "numpy", "lightning", "transformers", *_LOADERS)


def facts_of_loader(loader: Any) -> dict[str, Any]:
    """Return what is known of a loader and of the process that iterates it."""
    torch: Any = sys.modules["torch"]
    facts: dict[str, Any] = {
        "loader": _package_of(loader),
        "loader_class": _class_name(loader),
        "dataset_name": _class_name(loader.dataset),
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "drop_last": bool(loader.drop_last),
        "start_method": _start_method(loader),
        "sampler": _class_name(getattr(loader, "sampler", None)),
        "shuffle": "random" in _class_name(getattr(loader, "sampler", None)).lower(),
        "num_threads_torch": torch.get_num_threads(),
        "python": platform.python_version(),
        "framework": {
            name: str(getattr(sys.modules[name], "__version__", ""))
            for name in _FRAMEWORKS
            if name in sys.modules
        },
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "device": _device(torch),
    }
    batch_size = _batch_size(loader)
    if batch_size is not None:
        facts["batch_size"] = batch_size
        facts["global_batch_size"] = batch_size * facts["world_size"]
    with suppress(Exception):  # Iterable data sets need not know their length.
        facts["num_samples"] = len(loader.dataset)
    return facts


def _batch_size(loader: Any) -> int | None:
    if isinstance(loader.batch_size, int):
        return loader.batch_size
    for holder in (getattr(loader, "batch_sampler", None), loader.dataset):
        found = getattr(holder, "batch_size", None) or getattr(holder, "batchsize", None)
        if isinstance(found, int):
            return found
    return None


def _start_method(loader: Any) -> str:
    if not loader.num_workers:
        return "none"
    import multiprocessing

    context = loader.multiprocessing_context or multiprocessing.get_context()
    method: str = context.get_start_method()
    return method


def _device(torch: Any) -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _package_of(loader: Any) -> str:
    for thing in (loader.dataset, loader):
        for kind in type(thing).__mro__:
            package = kind.__module__.split(".")[0]
            if package in _LOADERS:
                return _LOADERS[package]
    return "torch"


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
