"""The user's line that is being recorded, and the variable that it assigns to.

A program is recorded by calling the user's function once. Nodes and errors name the line of that
function; frames of the language itself stand in between.
"""

from __future__ import annotations

import dis
import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from penstock.errors import ProgramError

__all__ = ["here", "line_in", "located", "users_frame", "variable_of"]

_WRITERS = ("lines", "mistakes", "trace", "language", "gradient", "calls")
_INNER = {str(Path(__file__).with_name(f"{name}.py")) for name in _WRITERS}
"""Files whose frames are not the user's, but lie inside of it."""
_LIBRARIES = ("torch", "numpy")
"""The user may call their functions with values, so their frames are inner ones too."""
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


def users_frame() -> FrameType | None:
    """Return the user's innermost frame, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    return frame


def _is_inner(frame: FrameType) -> bool:
    if frame.f_code.co_filename in _INNER:
        return True
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def here() -> str:
    """Return the user's current line: its file, its number and its text."""
    frame = users_frame()
    return "" if frame is None else _shown(frame.f_code.co_filename, frame.f_lineno)


def line_in(trace: TracebackType | None, is_users: Callable[[FrameType], bool]) -> str:
    """Return the user's last line that an error went through; empty if there is none."""
    found = ""
    while trace is not None:
        if is_users(trace.tb_frame):
            found = _shown(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def located(error: ProgramError) -> ProgramError:
    """Return an error that begins with the user's line."""
    where = here()
    said = str(error)
    return error if not where or said.startswith(where) else ProgramError(f"{where}: {said}")


def _shown(path: str, number: int) -> str:
    text = linecache.getline(path, number).strip()
    return f"{Path(path).name}:{number}" + (f": `{text}`" if text else "")


@lru_cache(maxsize=256)
def _stores_of(code: CodeType) -> tuple[list[int], list[str]]:
    """Return the offsets of instructions, and the variable that the next instruction stores to."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    after = [str(s.argval) if s.opname in _STORES else "" for s in steps[1:]]
    return [step.offset for step in steps], [*after, ""]


def variable_of(frame: FrameType) -> str:
    """Return the variable that the current call of a frame is assigned to; empty if none."""
    # During a call `f_lasti` may point behind its instruction, into the inline caches.
    offsets, names = _stores_of(frame.f_code)
    return names[bisect_right(offsets, frame.f_lasti) - 1]
