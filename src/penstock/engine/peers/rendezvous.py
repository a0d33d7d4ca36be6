"""A rendezvous: a few keys that all nodes can read, where they meet before they know each other.

If the job has a torch store, that is the rendezvous (`penstock.loader.torch.rendezvous`); otherwise
any store that Penstock can write to. A value that was put must become readable for others soon, and
nothing else is required: keys of earlier runs may remain for ever (see `meeting`). The run's secret
lies there, so whoever can read the rendezvous can join the job.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from pathlib import Path
from typing import Protocol

from penstock.errors import ExistsError, NotFoundError, RendezvousError, StoreError
from penstock.storage import Store, StoreOptions, open_store
from penstock.units import show_seconds

_WAIT_S = 0.01
_WAIT_MAX_S = 0.5
"""Time between two looks for a key: at first, and later on."""


class Rendezvous(Protocol):
    """A place that all processes of a job can reach. Values are small."""

    def put(self, key: str, value: bytes) -> None:
        """Put a value; it replaces an earlier one."""

    def put_once(self, key: str, value: bytes) -> bytes:
        """Put a value if there is none; return the value that is there then."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value; raise `RendezvousError` if it does not come in time."""

    def try_get(self, key: str) -> bytes | None:
        """Return a value, or None if there is none."""


class PollSchedule:
    """When to look again for a key: less and less often, until a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._wait_s = _WAIT_S

    def sleep(self) -> bool:
        """Wait before the next look; return False if the deadline has passed."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            return False
        # Jitter: many ranks wait for the same key and must not all look at the same moment.
        time.sleep(min(left_s, self._wait_s * random.uniform(0.5, 1.0)))
        self._wait_s = min(2 * self._wait_s, _WAIT_MAX_S)
        return True

    def renew(self) -> None:
        """Look often again, because something has happened."""
        self._wait_s = _WAIT_S


def wait_for(rendezvous: Rendezvous, key: str, patience: PollSchedule) -> bytes | None:
    """Return a value once it is there; None if it does not come in time."""
    while True:
        value = rendezvous.try_get(key)
        if value is not None or not patience.sleep():
            return value


class StoreRendezvous:
    """A folder that all nodes see, or a prefix in an object store."""

    def __init__(
        self, place: str | os.PathLike[str] | Store, options: StoreOptions | None = None
    ) -> None:
        self._store = place if isinstance(place, Store) else open_store(place, options)
        self._folder = None
        if self._store.source == "folder":
            # A private folder inside the named one, which other users may be able to read.
            self._folder = Path(self._store.uri) / f"penstock-{os.geteuid()}"
            self._store = open_store(self._folder, options)

    def __repr__(self) -> str:
        return f"StoreRendezvous({self._store.uri!r})"

    def put(self, key: str, value: bytes) -> None:
        """Write an object."""
        self._prepare()
        self._store.write(key, value)

    def put_once(self, key: str, value: bytes) -> bytes:
        """Write an object unless there is one."""
        self._prepare()
        while True:
            try:
                self._store.write(key, value, only_if_absent=True)
                return value
            except ExistsError:
                found = self.try_get(key)
                if found is not None:
                    return found

    def get(self, key: str, timeout_s: float) -> bytes:
        """Look for an object until it is there."""
        value = wait_for(self, key, PollSchedule(timeout_s))
        if value is None:
            raise RendezvousError(
                f"nobody put {self._store.uri}{key} within {show_seconds(timeout_s)}; start all "
                "nodes with the same rendezvous, and see whether they can all write to it"
            )
        return value

    def try_get(self, key: str) -> bytes | None:
        """Read an object."""
        try:
            return bytes(self._store.read(key))
        except NotFoundError:
            return None
        except StoreError as error:
            if error.retryable:
                return None  # Overloaded or down for now; whoever waits looks again.
            raise

    def count(self, prefix: str) -> int:
        """Return how many keys begin with a prefix."""
        return sum(1 for _ in self._store.list(prefix))

    def remove(self, prefix: str) -> None:
        """Remove all keys that begin with a prefix."""
        for found in list(self._store.list(prefix)):
            self._store.delete(found.key)
        if self._folder is not None:
            # The keys are removed; their empty folders remain.
            shutil.rmtree(self._folder / prefix, ignore_errors=True)

    def _prepare(self) -> None:
        """Make the folder private to its owner, because secrets of runs lie in it."""
        if self._folder is None:
            return
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        status = self._folder.stat(follow_symlinks=False)
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if not is_private or status.st_uid != os.geteuid():
            raise RendezvousError(
                f"{self._folder} is not a folder of this user alone (owner {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):o}), and the secrets of runs would lie in it; "
                "remove it, or meet somewhere else"
            )
