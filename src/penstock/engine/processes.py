"""Worker processes, for transforms that hold the interpreter's lock.

Processes are spawned, never forked: they start clean, whatever threads and connections this one
has. Each reads, decodes and transforms on its own, so only ids go out and finished samples come
back. What lies in a tier it reads from there: this process has seen to it that it does. Among
several nodes what belongs where may change, so there the bytes go out with the ids. An error there
reaches the caller with the traceback of the process it happened in.
"""

from __future__ import annotations

import copyreg
import io
import multiprocessing
import pickle
import random
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.convert import seed_tensors, tensor_reducers
from penstock.errors import OptionError, WorkerError
from penstock.order import key_of

_payload = b""
_unpacked: tuple[Any, Any, int, Any] | None = None


class ProcessPool:
    """A fixed number of processes that make samples."""

    def __init__(
        self, num_processes: int, dataset: Any, transform: Any, seed: int, tiers: Any = ()
    ) -> None:
        try:
            payload = pickle.dumps((dataset, transform, seed, tiers))
        except Exception as error:
            raise OptionError(
                f"workers='process' sends the data set and the transform to other processes, but "
                f"they cannot be pickled ({error}); define the transform at the top of a module"
            ) from error
        self._executor = ProcessPoolExecutor(
            num_processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(payload,),
        )

    def samples(
        self, epoch: int, ids: Ints, uses: Ints, raws: list[list[bytes]] | None = None
    ) -> list[Any]:
        """Return transformed samples, made by a process; of `raws`, if these are given."""
        try:
            made = self._executor.submit(_make, epoch, ids.tolist(), uses.tolist(), raws)
            samples: list[Any] = pickle.loads(made.result())
            return samples
        except BrokenProcessPool as error:
            raise WorkerError(
                "a worker process died without an error of its own: it ran out of memory, was "
                "killed, crashed in native code, or the program lacks `if __name__ == "
                '"__main__":`, which spawned processes need; try workers="thread" to see more'
            ) from error

    def close(self) -> None:
        """End the processes at once."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _start(payload: bytes) -> None:
    global _payload
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop; it ends us.
    _payload = payload  # Unpacked with the first batch: an error there has a way back.


def _make(epoch: int, ids: list[int], uses: list[int], raws: list[list[bytes]] | None) -> bytes:
    from penstock.engine.decode import generator_for, wants_generator
    from penstock.engine.holding import Holding

    global _unpacked
    if _unpacked is None:
        dataset, transform, seed, tiers = pickle.loads(_payload)
        _unpacked = dataset, transform, seed, Holding(dataset, tiers) if tiers else None
    dataset, transform, seed, holding = _unpacked
    if raws is not None:
        samples = _decoded(dataset, np.array(ids, np.int64), raws)
    elif holding is None:
        samples = dataset.__getitems__(ids)
    else:
        samples = holding.samples(dataset, np.array(ids, np.int64))
    if transform is None:
        return packed(samples)
    takes_generator = wants_generator(transform)
    out = []
    for i, use, sample in zip(ids, uses, samples, strict=True):
        _seed_generators(key_of(seed, "transform", epoch, i, use))
        more = (generator_for(seed, epoch, i, use),) if takes_generator else ()
        out.append(transform(sample, *more))
    return packed(out)


def _seed_generators(key: int) -> None:
    """Seed the generators that all code of this process shares, for one use of a sample.

    Here one sample is transformed at a time. Unseeded, torch's would give the same numbers in every
    process that is spawned, and the others' different ones in every run.
    """
    random.seed(key)
    np.random.seed(key % 2**32)
    seed_tensors(key)


def packed(samples: list[Any]) -> bytes:
    """Return samples as bytes for another process.

    The executor's own pickler would do as torch tells it, and send a file descriptor for each
    tensor: more than a process may have, for a batch of samples.
    """
    out = io.BytesIO()
    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **tensor_reducers()}
    pickler.dump(samples)
    return out.getvalue()


def _decoded(dataset: Any, ids: Ints, raws: list[list[bytes]]) -> list[Any]:
    """Return decoded samples whose bytes are here already; of blocks, each is unpacked once."""
    out: list[Any] = [None] * len(ids)
    blocks: dict[int, Any] = {}
    for bound, where, local_ids in dataset.groups(ids):
        rows = bound.part.tables[0].extents(local_ids).row if bound.by_block else None
        for j, i in enumerate(where.tolist()):
            if rows is None:
                views = [memoryview(raw) for raw in raws[i]]
                out[i] = bound.decoded_all(local_ids[j : j + 1], [views])[0]
                continue
            name, local = id(raws[i][0]), int(local_ids[j])
            if name not in blocks:
                blocks[name] = bound.unpack(local, memoryview(raws[i][0]))
            out[i] = bound.decoded(blocks[name].sample(int(rows[j])), local)
    return out
