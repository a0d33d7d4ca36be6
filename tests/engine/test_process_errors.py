"""Exceptions on their way to another process."""

from penstock.engine.process_errors import packed_error, unpacked_error
from penstock.errors import OptionError, WorkerError


class NeedsTwoError(Exception):
    """Can be pickled, but not unpickled: its arguments are not those of `__init__`."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_exception_keeps_its_class_its_notes_and_its_traceback() -> None:
    error = raised(OptionError("give a number"))
    error.add_note("in sample 7")
    found = unpacked_error(packed_error(error))
    assert type(found) is OptionError
    assert str(found) == "give a number"
    assert found.__notes__ == ["in sample 7"]
    assert "in raised" in str(found.__cause__)


def test_an_exception_that_cannot_be_unpickled_is_named() -> None:
    found = unpacked_error(packed_error(raised(NeedsTwoError(1, 2))))
    assert isinstance(found, WorkerError)
    assert str(found).endswith("NeedsTwoError: 1 and 2")
    assert "in raised" in str(found.__cause__)
