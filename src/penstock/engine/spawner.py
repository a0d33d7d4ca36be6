"""The processes that start engine and workers; nothing of the training process is inherited.

The *starter* is a fresh interpreter beside the training process, one for all its loaders. It has
imported this module, and has no thread, so it can fork at any time. For each loader it forks a
*spawner*, which imports what the user's functions need, and then forks the engine and, when the
engine asks for them, workers. A worker starts in milliseconds and shares the imported modules. The
user's main module is never run again.

The first batch waits for all of that. So this module imports only what every batch needs, and the
garbage collector is off in starter and spawner, which only import, fork and wait. In engine and
workers it is on.

All of them end with the training process, however that ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.engine.channel import ChannelClosed, FrameChannel
from penstock.engine.process import run_engine
from penstock.engine.process_errors import packed_error
from penstock.engine.worker import WorkerProcess
from penstock.trace.recorder import close_recorders

ENGINE_NICE, WORKER_NICE = 5, 15
"""Their nice values: the training process comes first, then the engine, for which workers wait,
then the workers. Starter and spawner keep the priority of the training process: while they import,
it waits for its first batch; after that they do nothing."""
_LEAVE_S = 10.0
"""How long an engine may take to close its tiers and leave the other nodes."""
_CHILDREN_S = 20
"""How long a process waits for the end of killed children."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_libc = ctypes.CDLL(None)


def start_process_name(name: str) -> None:
    """Show a name in lists of processes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stand_back(nice: int) -> None:
    """Lower the priority of this process to a value, unless it is lower already."""
    with suppress(OSError):
        os.nice(max(0, nice - os.nice(0)))


class SpawnerProcess:
    """Forks engine and workers on request, and reports how they end."""

    def __init__(self, front: FrameChannel, front_pid: int) -> None:
        start_process_name("penstock-spawn")
        self._front = front
        self._front_pid = front_pid
        self._engine: FrameChannel | None = None
        self._engine_pid = 0
        self._numbers: dict[int, int] = {}
        """Numbers of workers by process."""
        self._wake, wakes = socket.socketpair()
        self._wake.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._payload: Any = None

    def run(self) -> None:
        """Serve until the training process is gone."""
        poll = select.poll()
        poll.register(self._front.fileno(), select.POLLIN)
        poll.register(self._wake.fileno(), select.POLLIN)
        with suppress(OSError, AttributeError):
            # The socket alone does not tell: a fork of the training process may hold its other end.
            self._front_file = os.pidfd_open(self._front_pid)
            poll.register(self._front_file, select.POLLIN)
        engine_file = -1
        while True:
            if self._engine is not None and self._engine.fileno() != engine_file:
                engine_file = self._engine.fileno()
                poll.register(engine_file, select.POLLIN)
            for file, _ in poll.poll():
                if file == self._front.fileno():
                    self._from_front()
                elif self._engine is not None and file == engine_file:
                    if not self._from_engine(self._engine):
                        poll.unregister(engine_file)
                        self._engine.close()
                        self._engine, engine_file = None, -1
                elif file == self._wake.fileno():
                    self._reap()
                else:
                    self.end()  # The training process is gone.

    # -- requests ----------------------------------------------------------------------------

    def _from_front(self) -> None:
        frame, files = self._front.receive()
        word = frame[:1]
        if word == b"P":
            self._load(bytes(frame[1:]))
        elif word == b"E":
            self._fork_engine(files)
        elif word == b"Q":
            self.leave()

    def _load(self, data: bytes) -> None:
        try:
            _, self._payload = pickle.loads(data)
            one_thread_each()
            self._front.send(b"L" + str(os.getpid()).encode())
        except BaseException as error:
            self._front.send(b"X" + packed_error(error))

    def _fork_engine(self, files: list[int]) -> None:
        mine, theirs = socket.socketpair()
        payload = self._payload

        def run() -> None:
            start_process_name("penstock-engine")
            stand_back(ENGINE_NICE)
            run_engine(payload, [socket.socket(fileno=f) for f in files], FrameChannel(theirs))
            close_recorders()  # `os._exit` skips what `atexit` was told.

        self._engine_pid = self._fork(run, keep=[*files, theirs.fileno()])
        for file in files:
            os.close(file)
        theirs.close()
        self._engine = FrameChannel(mine)
        self._front.send(b"E" + str(self._engine_pid).encode())

    def _from_engine(self, engine: FrameChannel) -> bool:
        """Fork the worker that the engine asks for; return whether the engine still can ask."""
        try:
            frame, files = engine.receive()
        except ChannelClosed:
            return False
        number = int(frame)
        end = files[0]

        def run() -> None:
            start_process_name("penstock-worker")
            stand_back(WORKER_NICE)
            with suppress(OSError, AttributeError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            WorkerProcess(FrameChannel(socket.socket(fileno=end)), self._payload.worker_job).run()
            close_recorders()

        pid = self._fork(run, keep=[end])
        self._numbers[pid] = number
        os.close(end)
        with suppress(ChannelClosed):
            engine.send(pickle.dumps((number, pid, None)))
        return True

    def _fork(self, run: Callable[[], None], keep: list[int]) -> int:
        parent = os.getpid()
        gc.freeze()  # Else the collectors of the children would write to the pages that they share.
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            gc.enable()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # The parent died before `die_with_parent`.
            self._close_files(keep)
            run()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_files(self, keep: list[int]) -> None:
        """Close the spawner's files: copies of its sockets would hide that it is gone."""
        ours = {self._front.fileno(), self._wake.fileno(), self._wakes.fileno()}
        ours.add(getattr(self, "_front_file", -1))
        if self._engine is not None:
            ours.add(self._engine.fileno())
        for file in ours - set(keep) - {-1}:
            os.close(file)

    # -- ends --------------------------------------------------------------------------------

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._engine_pid:
                self._engine_pid = 0
                self._end_workers()
                self._front.send(b"D" + str(code).encode())
            elif pid in self._numbers:
                number = self._numbers.pop(pid)
                if self._engine is not None:
                    with suppress(ChannelClosed):
                        self._engine.send(pickle.dumps((number, pid, code)))

    def _end_workers(self) -> None:
        """Kill workers whose engine is gone, also those that are inside of a transform."""
        for pid in self._numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._numbers.clear()

    def leave(self) -> NoReturn:
        """End after the training process has closed its end; the engine may finish first."""
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        if hasattr(self, "_front_file"):
            poll.register(self._front_file, select.POLLIN)
        end_s = time.monotonic() + _LEAVE_S
        while self._engine_pid and (left_s := end_s - time.monotonic()) > 0:
            if any(file != self._wake.fileno() for file, _ in poll.poll(1000 * left_s)):
                break
            with suppress(ChannelClosed):
                self._reap()
        self.end()

    def end(self) -> NoReturn:
        """End all children, and this process."""
        self._end_workers()
        if self._engine_pid:
            with suppress(ProcessLookupError):
                os.kill(self._engine_pid, signal.SIGKILL)
        wait_for_children()
        os._exit(0)


def wait_for_children() -> None:
    """Wait until all children are gone, so that none is left as a zombie to another process."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(_CHILDREN_S)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def one_thread_each() -> None:
    """Limit imported libraries to one thread: the parallelism is in the workers."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def serve_front(front: FrameChannel, front_pid: int) -> None:
    """Fork a spawner for each loader of a training process, until that is gone."""
    poll = select.poll()
    poll.register(front.fileno(), select.POLLIN)
    files: list[int] = []
    with suppress(OSError, AttributeError):
        files.append(os.pidfd_open(front_pid))
        poll.register(files[0], select.POLLIN)
    while True:
        if any(file in files for file, _ in poll.poll()):
            return
        try:
            frame, ends = front.receive()
        except ChannelClosed:
            return
        place: ProcessSurroundings = pickle.loads(frame)
        place.enter()
        for name in place.modules:
            with suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # As in `SpawnerProcess._fork`.
        if os.fork() == 0:
            front.close()
            for file in files:
                os.close(file)
            _be_spawner(ends[0], front_pid)
        os.close(ends[0])


def _be_spawner(end: int, front_pid: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        spawner = SpawnerProcess(FrameChannel(socket.socket(fileno=end)), front_pid)
        try:
            spawner.run()
        except ChannelClosed:
            spawner.leave()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class ProcessSurroundings:
    """Environment, import path, folder and cores, taken over from the training process."""

    environment: dict[str, str]
    path: list[str]
    folder: str
    affinity: set[int]
    modules: tuple[str, ...]
    """Modules that engine or workers need: imported once for all loaders."""

    @classmethod
    def here(cls, modules: tuple[str, ...] = ()) -> ProcessSurroundings:
        """Return the surroundings of this process."""
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        return cls(environment, list(sys.path), os.getcwd(), os.sched_getaffinity(0), modules)  # noqa: PTH109

    def enter(self) -> None:
        """Take them over."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        with suppress(OSError):
            os.chdir(self.folder)
        with suppress(OSError):
            os.sched_setaffinity(0, self.affinity)


def main(file: int, front_pid: int) -> None:
    """Run the starter on a descriptor that the training process has left open."""
    start_process_name("penstock-start")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody asks how a spawner ended.
    serve_front(FrameChannel(socket.socket(fileno=file)), front_pid)
    wait_for_children()
    os._exit(0)
