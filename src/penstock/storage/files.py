"""A cache of open files, for the next range of the same file.

On network file systems `open` costs a round trip and `stat` usually does not. So files stay open,
and `stat` tells whether a name still means the same file. The comparison is exact, because an inode
number is not reused while the file is open. The cache is bounded; a file that leaves it while a
thread reads from it is closed when the read ends.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict

FILES_OPEN_MAX = min(256, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""Files kept open per process; the usual limit of a process is 1024."""


class OpenFile:
    """A descriptor that is closed when its last user drops it."""

    def __init__(self, path: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.identity = (status.st_dev, status.st_ino)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class FileCache:
    """The most recently used files, by path."""

    def __init__(self, files_max: int = FILES_OPEN_MAX) -> None:
        self._files_max = files_max
        self.forget_all()

    def forget_all(self) -> None:
        """Start again with an empty cache and a free lock."""
        # Guards the mapping. Reads hold the `OpenFile` instead, which keeps its descriptor open.
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def open(self, path: str) -> OpenFile:
        """Return the file that has this name now, opened if it is not in the cache."""
        status = os.stat(path)  # noqa: PTH116 - a Path costs as much as the call
        with self._lock:
            file = self._files.get(path)
            if file is not None and file.identity == (status.st_dev, status.st_ino):
                self._files.move_to_end(path)
                return file
        file = OpenFile(path)  # outside the lock, because it may take a round trip
        with self._lock:
            self._files[path] = file
            self._files.move_to_end(path)
            while len(self._files) > self._files_max:
                self._files.popitem(last=False)
        return file

    def forget(self, prefix: str) -> None:
        """Drop the files below a folder."""
        with self._lock:
            for path in [path for path in self._files if path.startswith(prefix)]:
                del self._files[path]


files = FileCache()
"""The one cache of this process."""

# Descriptors survive a fork, but another thread may have held the lock at that moment.
os.register_at_fork(after_in_child=files.forget_all)
