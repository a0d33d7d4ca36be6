"""Which files Python opens, where no library is preloaded: names and times, no reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from penstock.trace.foreign.process import recorder_if_any, safely, trace_folder
from penstock.trace.schema import Kind

_NOISE = (".py", ".pyc", ".so", ".pyi", "pyvenv.cfg")
_PREFIXES = ("/proc/", "/sys/", "/etc/", "/usr/lib", "/usr/share/", "/dev/")


def record_opens() -> None:
    """Record files that Python opens from now on."""
    own = str(trace_folder())

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            path = arguments[0]
            if not path.endswith(_NOISE) and not path.startswith((*_PREFIXES, own)):
                _record(path)

    sys.addaudithook(heard)


@safely
def _record(path: str) -> None:
    # Before the first loader there is no recorder, and its making opens files itself.
    to = recorder_if_any()
    if to is None or "/site-packages/" in path:
        return
    now_ns = time.perf_counter_ns()
    to.span(
        Kind.OPEN,
        now_ns,
        now_ns,
        object_id=to.name(path if path[0:1] == "/" else str(Path.cwd() / path)),
        count=1,
    )
