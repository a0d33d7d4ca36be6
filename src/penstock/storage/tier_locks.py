"""Locks of a tier: the kernel's record locks on bytes of one file.

    byte 0          the opening lock: held exclusively while a tier is opened, closed or removed
    byte 1          the users' lock: each process shares it as long as it has the tier open
    byte 16 + unit  a claim: the process that holds it exclusively fills that unit

No process is in charge. The kernel drops a lock when its process dies, for whatever reason, so no
stale locks remain and none needs a time-out. Only a process that holds byte 0 takes byte 1. So
while it holds byte 0, no process can become a user, and "nobody else holds byte 1" stays true.

These are POSIX locks, not locks of an open file description, which a forked child would keep after
its parent was killed. The price: they belong to the *process*, and all of them are dropped when it
closes any descriptor of the file. So a process opens the lock file of a tier only once
(`tier_registry`), and a set tells the claims of its threads apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time

from penstock.storage.process_wait import ProcessWait

OPENING = 0
USERS = 1
_CLAIMS_FROM = 16

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""

_NOT_NOW = (errno.EAGAIN, errno.EACCES)

_log = logging.getLogger("penstock.storage")


class RecordLocks:
    """The locks that this process holds on one file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.after_fork()

    def after_fork(self) -> None:
        """Start again without locks in a child, which does not inherit them."""
        # Guards the claims, and the descriptor against `close`: releasing a unit in a thread must
        # not unlock a byte of another file that got the same number.
        self._mutex = threading.Lock()
        self._claimed: set[int] = set()
        self.can_claim = True
        """Whether the file system can lock units against other processes."""

    def try_alone(self, byte: int) -> bool:
        """Lock a byte exclusively if nobody else has it; a shared lock of ours is converted."""
        return self._lock(fcntl.LOCK_EX, byte)

    def try_shared(self, byte: int) -> bool:
        """Share a byte's lock if nobody else holds it exclusively; our own is converted."""
        return self._lock(fcntl.LOCK_SH, byte)

    def drop(self, byte: int) -> None:
        """Unlock a byte."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, byte)

    def wait_alone(self, byte: int) -> bool:
        """Lock a byte exclusively, waiting for others; False if they do not unlock it."""
        patience, pause_s = ProcessWait(), 0.001
        while not self.try_alone(byte):
            if patience.is_over(self.holder(byte)):
                return False
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)
        return True

    def holder(self, byte: int) -> int | None:
        """Return the process that holds a byte; None if there is none, or it is not visible."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            found = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_GETLK, asked))
        except OSError:
            return None
        return found[-1] if found[0] != fcntl.F_UNLCK and found[-1] > 0 else None

    def _lock(self, how: int, byte: int) -> bool:
        try:
            fcntl.lockf(self.descriptor, how | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in _NOT_NOW:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the file, which drops all locks of this process on it."""
        with self._mutex:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def claim(self, unit: int) -> bool:
        """Claim a unit, against all other threads and processes; does not wait."""
        with self._mutex:
            if self.descriptor < 0 or unit in self._claimed or not self._claim_of_process(unit):
                return False
            self._claimed.add(unit)
            return True

    def _claim_of_process(self, unit: int) -> bool:
        if not self.can_claim:
            return True
        try:
            return self.try_alone(_CLAIMS_FROM + unit)
        except OSError as error:
            # Claims save work and protect no bytes: two processes that fill a unit write the same.
            self.can_claim = False
            _log.warning(
                "units of a tier cannot be locked (%s): processes may fetch some bytes twice",
                error.strerror,
            )
            return True

    def has_claimed(self, unit: int) -> bool:
        """Return whether a thread of this process has claimed a unit."""
        return unit in self._claimed

    def release(self, unit: int) -> None:
        """Give back the claim of a unit."""
        with self._mutex:
            self._claimed.discard(unit)
            if self.can_claim and self.descriptor >= 0:
                self.drop(_CLAIMS_FROM + unit)
