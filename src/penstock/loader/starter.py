"""The starter of this process: one fresh interpreter that forks for all loaders."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.spawner import ProcessSurroundings
from penstock.errors import EngineError

_CLOSE_S = 5.0
# The garbage collector is off: objects of modules stay, so it would find almost nothing, and
# without it importing torch takes a quarter less time. Engine and workers turn it on
# (`engine.spawner`).
_BOOT = (
    "import gc; gc.disable(); import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from penstock.engine.spawner import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Starter:
    """Starts spawners; begun with the first loader that needs one."""

    def __init__(self) -> None:
        channel, end = channel_pair()
        self._channel = channel
        self.pid = os.getpid()
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
        with end:
            self._process = subprocess.Popen(
                [*command, str(end.fileno()), str(self.pid)],
                pass_fds=[end.fileno()],
                env=ProcessSurroundings.here().environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the training loop.
            )

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def spawner(self, modules: tuple[str, ...]) -> FrameChannel:
        """Return a channel to a new spawner."""
        channel, end = channel_pair()
        with end:
            self._channel.send(pickle.dumps(ProcessSurroundings.here(modules)), [end.fileno()])
        return channel

    def close(self) -> None:
        """End its process; spawners go on."""
        self._channel.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Close it in a forked child; the process belongs to the parent."""
        self._channel.close()
        self._process.returncode = 0


_lock = threading.Lock()  # Held while a spawner is started: two threads may begin loaders.
_starter: Starter | None = None


def new_spawner(modules: tuple[str, ...]) -> FrameChannel:
    """Return a channel to a new spawner, from the starter of this process.

    `modules` are imported before it is forked, once for all loaders.
    """
    global _starter
    with _lock:
        for _ in range(2):
            if _starter is None or not _starter.is_alive:
                _starter = Starter()
            try:
                return _starter.spawner(modules)
            except ChannelClosed:
                _starter = None
    raise EngineError(
        "the process that starts engines and workers ends at once; what it printed says why, and "
        'workers="here" does without it'
    )


def _close() -> None:
    if _starter is not None and _starter.pid == os.getpid():
        _starter.close()


def _after_fork_in_child() -> None:
    global _starter, _lock
    _lock = threading.Lock()
    if _starter is not None:
        _starter.forget()
        _starter = None


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork_in_child)
