"""A Ray cluster as the crew: the only file that imports Ray, and only when it is asked for.

Items are handed out as Ray tasks, a bounded number at a time. Ray starts a task again when its
worker or its node dies; a task finds what it had finished in the store, and goes on from there. An
error of the data is a result like any other: it travels as a value and is raised here as it would
have been without Ray. What tasks return is small; tables go to the store.
"""

from __future__ import annotations

import importlib
import os
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.errors import (
    DatasetError,
    MissingPackageError,
    OptionError,
    PenstockError,
    WorkerError,
)
from penstock.storage.pool import ReadPool

J = TypeVar("J")
T = TypeVar("T")
R = TypeVar("R")

_RETRIES_MAX = 5
"""Times that Ray starts a task again whose worker or node died."""
_TASKS_PER_CPU = 2
"""Tasks in flight: one at work and one that waits for it to end."""
_TASKS_MAX = 4096
_GROUPS_PER_CPU = 8
"""The least number of groups of items, so that the last group does not keep all CPUs waiting."""
_LOOK_EVERY = 64
"""Tasks after which the size of the cluster is looked up again: nodes come and go."""
_KNOCK_S_MAX = 10.0
_END_S_MAX = 60.0
"""How long tasks that were cancelled are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What a task must know beside its work."""

    version: str
    """Of Penstock, here."""
    job_name: str
    at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteError:
    """An error that is not Ray's, on its way back."""

    error: Exception
    host: str


class RayCrew:
    """The workers of a Ray cluster, from `with` to the end of its block.

    Without an address it is the cluster that RAY_ADDRESS names, or the one that runs on this
    machine, or a new one here that ends with the block. A program that has called `ray.init` itself
    keeps its connection.
    """

    is_elsewhere = True

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._ray: Any = None
        self._is_ours = False

    def __enter__(self) -> Self:
        self._ray = _ray()
        if not self._ray.is_initialized():
            _connect(self._ray, self._address)
            self._is_ours = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ray, self._ray = self._ray, None
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()

    def map_unordered(
        self,
        function: Callable[[J, T], R],
        job: J,
        items: Sequence[T],
        *,
        at_once: int,
        together_max: int = 1,
        names: Callable[[T], str] = str,
    ) -> Generator[R, None, None]:
        """Yield results as they come; a task takes a group of items, with threads for them."""
        assert self._ray is not None, "a crew works inside its with block"
        task = self._ray.remote(num_cpus=1, max_retries=_RETRIES_MAX)(_do_group)
        shared = self._ray.put(self._ray.cloudpickle.dumps(job))
        terms = _Terms(version=_version(), job_name=secrets.token_hex(8), at_once=at_once)
        size = _group_size(len(items), self._cpus(), together_max)
        groups = (items[start : start + size] for start in range(0, len(items), size))
        start = partial(task.remote, terms, function, shared)
        with closing(self._answers(start, groups)) as answers:
            for group, answer in answers:
                yield from _results(group, answer, names)

    def _answers(
        self, start: Callable[[Sequence[T]], Any], groups: Iterator[Sequence[T]]
    ) -> Generator[tuple[Sequence[T], Any], None, None]:
        """Yield groups with what came back for them: results, a failure, or Ray's own error."""
        running: dict[Any, Sequence[T]] = {}
        num_done, room = 0, 0
        try:
            while True:
                if num_done % _LOOK_EVERY == 0:
                    room = min(_TASKS_MAX, max(2, _TASKS_PER_CPU * self._cpus()))
                while len(running) < room and (group := next(groups, None)) is not None:
                    running[start(group)] = group
                if not running:
                    return
                (ready,), _ = self._ray.wait(list(running), num_returns=1)
                group = running.pop(ready)
                num_done += 1
                yield group, self._answer(ready)
        finally:
            self._cancel(list(running))

    def _answer(self, ready: Any) -> Any:
        try:
            return self._ray.get(ready)
        except self._ray.exceptions.RayTaskError:
            raise  # a mistake of ours: with the traceback of where it happened
        except self._ray.exceptions.RayError as error:
            return error

    def _cancel(self, running: list[Any]) -> None:
        """Stop what has not begun and wait for the rest: nothing writes on after the block."""
        for task in running:
            self._ray.cancel(task)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_END_S_MAX)

    def _cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 1))


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingPackageError("working on a Ray cluster", "ray", "ray") from None


def _connect(ray: Any, address: str | None) -> None:
    if address is None:
        # A cluster that this starts here should not report its use to anybody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _knock(address or "")
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (OSError, RuntimeError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "this machine"
        first = str(error).strip().partition("\n")[0]
        raise OptionError(
            f"no Ray cluster answers at {where} ({first}); give the address that "
            "`ray start --head` printed (host:6379), or leave it out to use this machine alone"
        ) from error


def _knock(address: str) -> None:
    """Raise at once where nobody listens; Ray itself would keep trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S_MAX).close()


def _version() -> str:
    return str(sys.modules["penstock"].__version__)


def _group_size(num_items: int, num_cpus: int, together_max: int) -> int:
    return max(1, min(together_max, num_items // (_GROUPS_PER_CPU * max(1, num_cpus))))


def _do_group(
    terms: _Terms, function: Callable[[Any, T], R], job: bytes, items: Sequence[T]
) -> list[R] | _RemoteError:
    """Do the work for some items; this runs in a worker."""
    try:
        _check_version(terms.version)
        do = partial(function, _unpacked(terms.job_name, job))
        if len(items) == 1:
            return [do(items[0])]
        with ReadPool(min(terms.at_once, len(items))) as pool:
            return list(pool.map_unordered(do, items))
    except (PenstockError, OSError) as error:
        return _RemoteError(error=_portable(error), host=socket.gethostname())


_recent_job: tuple[str, Any] = ("", None)
"""The job that this worker unpacked last: it does many tasks of one job, and unpacking may take
seconds."""


def _unpacked(name: str, job: bytes) -> Any:
    global _recent_job
    if _recent_job[0] != name:
        _recent_job = (name, pickle.loads(job))
    return _recent_job[1]


def _check_version(version: str) -> None:
    if version != _version():
        raise DatasetError(
            f"{socket.gethostname()} has Penstock {_version()}, the command was started with "
            f"{version}; install the same on all nodes of the Ray cluster"
        )


def _portable(error: Exception) -> Exception:
    """Return an error that survives the way back; most do as they are."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return DatasetError(f"{type(error).__name__}: {error}")


def _results(group: Sequence[T], answer: Any, names: Callable[[T], str]) -> list[Any]:
    if isinstance(answer, _RemoteError):
        answer.error.add_note(f"It was found on {answer.host}.")
        raise answer.error
    if isinstance(answer, Exception):
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        raise WorkerError(
            f"Ray gave up {names(group[0])}{more} after {_RETRIES_MAX} new starts "
            f"({type(answer).__name__}): workers die there, often for want of memory; run the same "
            "command again to go on from what is done"
        ) from answer
    assert isinstance(answer, list)
    return answer
