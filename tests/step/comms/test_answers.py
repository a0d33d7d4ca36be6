"""A rank asks another for tensors, and is told why if there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from penstock.errors import PeerError, StateError
from penstock.step.comms.answers import Answers


@contextmanager
def pair(answer: Callable[[Sequence[int]], torch.Tensor]) -> Iterator[list[Answers]]:
    """Two ranks of one process that answer alike."""
    both, said = threading.Barrier(2), [b"", b""]

    def meeting(rank: int) -> Callable[[bytes], list[bytes]]:
        def meet(mine: bytes) -> list[bytes]:
            said[rank] = mine
            both.wait(20)
            return said

        return meet

    ranks = [Answers(answer, rank=rank, timeout_s=20) for rank in range(2)]
    other = threading.Thread(target=ranks[1].open, args=(meeting(1),))
    other.start()
    ranks[0].open(meeting(0))
    other.join()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def test_a_question_is_answered_with_a_tensor() -> None:
    with pair(lambda question: torch.tensor(question).float()) as ranks:
        into = torch.empty(4)
        with ranks[0].asking(1) as peer:
            for question in ((1, 2, 3, 4), (0, -1, 5, 7)):
                peer.ask(question, into)
                assert into.tolist() == [float(number) for number in question]


@pytest.mark.parametrize("error", [StateError("it has changed"), IndexError("it has changed")])
def test_the_reason_for_which_there_is_no_answer_is_told(error: Exception) -> None:
    def refuse(question: Sequence[int]) -> torch.Tensor:
        raise error

    with (
        pair(refuse) as ranks,
        ranks[1].asking(0) as peer,
        pytest.raises(StateError, match=r"rank 0: .*it has changed"),
    ):
        peer.ask((0, 0, 0, 0), torch.empty(1))


def test_a_rank_that_has_closed_is_named() -> None:
    with pair(lambda question: torch.zeros(1)) as ranks:
        ranks[1].close()
        with pytest.raises(PeerError, match="rank 1 does not answer rank 0"), ranks[0].asking(1):
            pass
