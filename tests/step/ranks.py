"""Run a function on several real processes with a gloo group, and bring home what each returned.

    def work(rank, size, scale):            # at the top of a module: it travels by its name
        tensor = torch.full((3,), scale * rank)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    assert run_ranks(work, 2, 10.0) == [[10.0] * 3] * 2

Processes come from a fork server that has loaded torch and us, so a rank starts in milliseconds;
each has one thread for compute. The first rank that fails is the one that is told about: what the
others say afterwards is mostly that it is gone. A rank named in `dies` may end without a word, and
its result is None.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PRELOADED = [
    *("torch", "torch.distributed", "pytest", "penstock.testing"),
    *("penstock.step.attached", "penstock.step.groups", "penstock.step.tuner"),
    # Every optimizer of torch imports it at its first step: as much time as torch itself.
    "torch._dynamo",
]
"""What modules of tests import: a rank would take seconds to load it anew."""
GROUP_TIMEOUT_S = 20.0
"""How long an operation waits for a rank that does not come."""
RUN_TIMEOUT_S = 120.0
"""After this the ranks are ended: a test that hangs should say which ranks did not answer."""


class RankError(Exception):
    """What the first rank that failed has said: its traceback as text, and its number."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.rank, self.text)


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    dies: Collection[int] = (),
    group_timeout_s: float = GROUP_TIMEOUT_S,
    start: str = "forkserver",
) -> list[Any]:
    """Call `fn(rank, size, *args)` on `size` processes and return the results by rank.

    With `start="fork"` they have what this process has loaded; it must have no other threads.

    Raises:
        RankError: of the first rank that failed; all ranks are ended by then.
    """
    context: Any = multiprocessing.get_context(start)
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="penstock-ranks-") as folder:
        store, processes, ours = f"{folder}/store", [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            more = {"connection": theirs, "store": store, "timeout_s": group_timeout_s}
            words = (fn, rank, size, args)
            process = context.Process(target=_rank, args=words, kwargs=more, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ours.append(mine)
        try:
            return _collect(ours, processes, dies)
        finally:
            for process, connection in zip(processes, ours, strict=True):
                connection.close()
                _end(process)


def _rank(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
    *,
    connection: Connection,
    store: str,
    timeout_s: float,
) -> None:
    """Be one rank: make the group, call, tell, and stay until all have told."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        said = pickle.dumps((True, fn(rank, size, *args)))
    except BaseException:
        said = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(said)
    try:
        # Whoever leaves first would cut connections that others still use.
        connection.recv_bytes()
    except EOFError:
        os._exit(1)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _collect(
    connections: list[Connection], processes: list[BaseProcess], dies: Collection[int]
) -> list[Any]:
    results: list[Any] = [None] * len(connections)
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    end_s = time.monotonic() + RUN_TIMEOUT_S
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end_s - time.monotonic()))
        if not ready:
            raise RankError(min(waiting.values()), f"no answer after {RUN_TIMEOUT_S:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            results[rank] = _result(connection, rank, processes[rank], dies)
    for rank, connection in enumerate(connections):
        if rank not in dies:
            connection.send_bytes(b"all have told")
    for process in processes:
        process.join(10)
    return results


def _result(connection: Connection, rank: int, process: BaseProcess, dies: Collection[int]) -> Any:
    try:
        is_good, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        if rank in dies:
            return None
        process.join(5)
        raise RankError(rank, f"ended without a word, exit code {process.exitcode}") from None
    if not is_good:
        raise RankError(rank, value)
    return value


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.kill()
    process.join()
    process.close()
