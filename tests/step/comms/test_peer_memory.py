"""What ranks say to each other about their GPU memory is read as plain values."""

import pickle
from pathlib import Path

import msgspec
import pytest

from penstock.errors import OptionError, RendezvousError
from penstock.step.comms.peer_memory import PeerArena


class _Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def _opened(answers: list[bytes]) -> None:
    PeerArena(lambda said: [said, *answers], rank=0, size=2, size_bytes=4096).open()


def test_nothing_that_a_rank_says_is_unpickled(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with pytest.raises(RendezvousError, match="the same version of Penstock"):
        _opened([pickle.dumps(_Touches(touched))])
    assert not touched.exists()


@pytest.mark.parametrize(
    "answer",
    [
        {"size_bytes": "4096"},
        {"size_bytes": 4096, "handles": [[0, b"h"]]},
        {"size_bytes": 4096, "handles": "xx"},
        {"size_bytes": 4096, "trouble": 3},
        [],
    ],
)
def test_a_word_of_another_shape_is_refused(answer: object) -> None:
    with pytest.raises(RendezvousError, match="the same version of Penstock"):
        _opened([msgspec.msgpack.encode(answer)])


@pytest.mark.parametrize("handles", [[], [None], [None, None], [None] * 3])
def test_handles_for_another_number_of_ranks_are_refused(handles: list[None]) -> None:
    word = {"size_bytes": 4096, "handles": handles}
    with pytest.raises(RendezvousError, match="rank 1 offers its GPU memory"):
        _opened([msgspec.msgpack.encode(word)])


def test_trouble_of_one_rank_is_raised_on_all() -> None:
    word = msgspec.msgpack.encode({"size_bytes": 4096, "trouble": "rank 1 is out of memory"})
    with pytest.raises(OptionError):
        _opened([word])
