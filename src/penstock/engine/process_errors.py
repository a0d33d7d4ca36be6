"""Exceptions on their way to another process, always with the traceback of the process that raised
them, and with their class if it can be pickled."""

from __future__ import annotations

import pickle
import traceback

import cloudpickle

from penstock.errors import WorkerError


class RemoteTraceback(Exception):  # noqa: N818
    """The traceback of an error in another process, as text, because frames cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def packed_error(error: BaseException) -> bytes:
    """Return an exception for another process."""
    text = "".join(traceback.format_exception(error))
    notes = list(getattr(error, "__notes__", ()))
    try:
        data: bytes = cloudpickle.dumps((error, notes, text))
        unpacked_error(data)  # Some classes can be pickled, but not unpickled.
        return data
    except Exception:
        name = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        return pickle.dumps((WorkerError(name), notes, text))


def unpacked_error(data: bytes) -> BaseException:
    """Return an exception that another process has sent, caused by its traceback there."""
    error, notes, text = pickle.loads(data)
    assert isinstance(error, BaseException)
    error.__notes__ = notes
    error.__cause__ = RemoteTraceback(text)
    return error
