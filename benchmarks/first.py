"""The first batch: how soon it comes, and what memory it takes, in a process that just started.

Three tasks that run inside a peer's environment. `open_many` opens a set and takes one batch.
`save` runs to a place in an epoch and writes down the loader's state and the ids of the batch that
comes next; `resume` goes on from there in a new process, which must get the very same batch.

A peer takes part in the last two with `open_stateful(work, folder, variant)`: an iterable with
torch's `state_dict` and `load_state_dict`.
"""

import pickle
import time
from pathlib import Path

import numpy as np

from benchmarks import look, tree
from benchmarks.works import Work


def open_many(peer: object, work: Work, task: dict) -> dict:
    before = tree.memory_bytes([])["private_bytes"]
    began = time.perf_counter()
    start = peer.open_loader(work, Path(task["folder"]), task["variant"])
    opened = time.perf_counter()
    batches = iter(start(0))
    batch = next(batches)
    got = time.perf_counter()
    assert len(look.ids_of(work, batch)) == work.batch_size
    # While the loader still stands in the midst of its epoch, as it would in training.
    memory = tree.memory_bytes(tree.descendants())
    del batches
    return {
        "open_s": opened - began,
        "first_batch_s": got - began,
        "private_bytes_more": memory["private_bytes"] - before,
        **memory,
    }


def save(peer: object, work: Work, task: dict) -> dict:
    """Run to a fraction of an epoch and write state and next ids into a file."""
    loader = peer.open_stateful(work, Path(task["folder"]), task["variant"])
    batches = iter(loader)
    for _ in range(int(work.num_batches * task["fraction"])):
        next(batches)
    began = time.perf_counter()
    state = pickle.dumps(loader.state_dict())
    state_ms = 1000 * (time.perf_counter() - began)
    ids = look.ids_of(work, next(batches))
    Path(task["state"]).write_bytes(pickle.dumps((state, ids)))
    return {"state_bytes": len(state), "state_ms": state_ms}


def resume(peer: object, work: Work, task: dict) -> dict:
    """Return when the first batch came, from the start of the process and of the opening."""
    began_at = time.time()
    loader = peer.open_stateful(work, Path(task["folder"]), task["variant"])
    expected = None
    if task["state"]:
        # Written by `save` of this very run, in a folder of its own.
        state, expected = pickle.loads(Path(task["state"]).read_bytes())
        loader.load_state_dict(pickle.loads(state))
    batch = next(iter(loader))
    got_at = time.time()
    return {
        "first_batch_s": got_at - task["started_at"],
        "of_it_opening_s": got_at - began_at,
        "right": expected is None or np.array_equal(look.ids_of(work, batch), expected),
    }
