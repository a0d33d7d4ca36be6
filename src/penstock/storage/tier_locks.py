"""Who does what with a tier: the kernel's record locks on bytes of one file.

    byte 0          the opening moment: held alone while a tier is opened, closed or removed
    byte 1          the users: each process shares it as long as it has the tier open
    byte 16 + unit  a claim: whoever holds it alone fills that unit

No process is in charge. A lock goes with its process, however that dies, so there is nothing to
clean up and nothing to time out. Byte 1 is only taken by those who hold byte 0: so "nobody else
holds byte 1" means what it says.

These are POSIX locks and not those of an open file description: a forked child would keep the
latter alive after its parent was killed. The price: they belong to the *process* and all go when
it closes any descriptor of the file. So a process opens the lock file of a tier once
(`tier_registry`), and claims of its threads are told apart by a set.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading

from penstock.clock import Clock, SystemClock
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
        """Start over in a child: locks are not inherited."""
        self._mutex = threading.Lock()
        self._claimed: set[int] = set()
        self.can_claim = True
        """Whether claims hold among processes."""

    def try_alone(self, byte: int) -> bool:
        """Take a byte alone if nobody else has it; a share that we have becomes that."""
        return self._lock(fcntl.LOCK_EX, byte)

    def try_shared(self, byte: int) -> bool:
        """Take a share of a byte if nobody has it alone."""
        return self._lock(fcntl.LOCK_SH, byte)

    def drop(self, byte: int) -> None:
        """Let go of a byte."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, byte)

    def wait_alone(self, byte: int, clock: Clock | None = None) -> bool:
        """Take a byte alone, waiting for others; False when they do not let go."""
        clock = clock or SystemClock()
        patience, pause_s = ProcessWait(clock), 0.001
        while not self.try_alone(byte):
            if patience.is_over(self.holder(byte)):
                return False
            clock.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)
        return True

    def holder(self, byte: int) -> int | None:
        """Return the process that holds a byte; None where there is none, or it is hidden."""
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
        """Close the file, which lets go of all locks; nothing is locked by this any more."""
        with self._mutex:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def claim(self, unit: int) -> bool:
        """Take a unit alone, among all threads of all processes."""
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
            # Claims save work, they do not guard bytes: two who fill a unit write the same.
            self.can_claim = False
            _log.warning(
                "units of a tier cannot be locked (%s): processes may fetch some bytes twice",
                error.strerror,
            )
            return True

    def has_claimed(self, unit: int) -> bool:
        """Return whether some thread of this process holds a unit."""
        return unit in self._claimed

    def release(self, unit: int) -> None:
        """Let go of a unit."""
        with self._mutex:
            self._claimed.discard(unit)
            if self.can_claim and self.descriptor >= 0:
                self.drop(_CLAIMS_FROM + unit)
