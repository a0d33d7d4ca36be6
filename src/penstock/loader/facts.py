"""What the choice between this process and others depends on, looked up here and now."""

from __future__ import annotations

import multiprocessing
import sys
import threading

from penstock.dataset.mixture import datasets_of
from penstock.engine.choice import WorkerFacts
from penstock.engine.options import LoaderOptions
from penstock.loader.engine_client import payload_of


def facts_of(options: LoaderOptions) -> tuple[WorkerFacts, bytes]:
    """Return the facts, and what processes of their own would be started with."""
    payload, unpicklable = b"", ""
    in_memory = any(bound.store.source == "memory" for bound in options.dataset.bound)
    if options.workers != "here" and not in_memory:
        try:
            payload = payload_of(options, _number_of(options))
        except Exception as error:
            unpicklable = f"something that the user gave cannot be sent to another process: {error}"
    facts = WorkerFacts(
        asked=options.workers,
        is_linux=sys.platform == "linux",
        is_free_threaded=not getattr(sys, "_is_gil_enabled", lambda: True)(),
        is_watched=sys.gettrace() is not None or threading.gettrace() is not None,
        is_worker=is_worker(),
        is_in_memory=in_memory,
        has_functions=options.transform is not None or options.collate is not None,
        data_bytes=sum(d.size_bytes for d in datasets_of(options.dataset)),
        unpicklable=unpicklable,
    )
    return facts, payload


def _number_of(options: LoaderOptions) -> int | None:
    return options.workers if isinstance(options.workers, int) else None


def is_worker() -> bool:
    """Return whether this is a worker of torch's DataLoader or another daemon of its kind."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        return True
    return bool(multiprocessing.current_process().daemon)
