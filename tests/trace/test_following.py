"""A trace that is followed: every row is seen once, whoever compresses meanwhile."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.trace import Kind, Recorder
from penstock.trace.following import TraceFollower
from penstock.trace.recorder import ROWS_MAX


def steps_of(follower: TraceFollower) -> list[int]:
    return [int(n) for process in follower.look() for _, rows in process.rows for n in rows["step"]]


@given(st.lists(st.sampled_from([1, 7, ROWS_MAX - 1, ROWS_MAX, ROWS_MAX + 3, "flush", "look"])))
@settings(max_examples=30, deadline=None)
def test_every_row_is_seen_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, moves: list[int | str]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder, role="train")
    follower, seen, num_rows = TraceFollower(folder), [], 0
    for move in moves:
        if move == "look":
            seen += steps_of(follower)
            assert len(seen) == num_rows  # Nothing waits for the next look.
        elif move == "flush":
            recorder.flush()
        else:
            for _ in range(int(move)):
                recorder.span(Kind.NEXT, num_rows, num_rows + 1, step=num_rows)
                num_rows += 1
    recorder.close()
    assert seen + steps_of(follower) == list(range(num_rows))
    assert steps_of(follower) == []


def test_rows_that_are_compressed_between_two_reads_come_with_the_next_look(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, role="train")
    recorder.span(Kind.NEXT, 0, 1, step=0)
    follower = TraceFollower(tmp_path)
    [process] = follower.look()
    before = process.path.read_bytes()
    recorder.span(Kind.NEXT, 1, 2, step=1)
    recorder.flush()
    recorder.span(Kind.NEXT, 2, 3, step=2)
    after = process.path.read_bytes()
    process.path.write_bytes(before)  # The look sees the file from before the flush.
    assert steps_of(follower) == []
    process.path.write_bytes(after)
    assert steps_of(follower) == [1, 2]


def test_what_else_a_process_says_is_followed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="engine", rank=3)
    follower = TraceFollower(tmp_path)
    follower.look()
    number = recorder.name("s3")
    recorder.facts({"loader": "penstock"})
    recorder.counters(5, {"cpu.user_s": 1.5})
    [process] = follower.look()
    assert process.names[number] == "s3"
    assert process.facts == {"loader": "penstock"}
    assert process.counters == [(os.getpid(), 5, {"cpu.user_s": 1.5})]
    assert (process.head["rank"], process.head["role"]) == (3, "engine")
    assert follower.look()[0].counters == []
    recorder.close()


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no trace"):
        TraceFollower(tmp_path).look()
