"""Frames over a socket pair: whole, in order, with files, and an end that both sides see."""

import os
import threading

import pytest

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair


def channels() -> tuple[FrameChannel, FrameChannel]:
    mine, theirs = channel_pair()
    return mine, FrameChannel(theirs)


def test_frames_arrive_whole_and_in_order() -> None:
    mine, theirs = channels()
    frames = [b"", b"x", os.urandom(3 << 20)]  # The last one is larger than the socket's buffer.
    sender = threading.Thread(target=lambda: [mine.send(frame) for frame in frames])
    sender.start()
    assert [bytes(theirs.receive()[0]) for _ in frames] == frames
    sender.join()


@pytest.mark.parametrize("num_files", [1, 128, 129, 300])
def test_files_arrive_open_with_their_frame(num_files: int) -> None:
    mine, theirs = channels()
    file = os.memfd_create("test")
    os.write(file, b"seen")
    mine.send(b"before")
    mine.send(b"data", [file] * num_files)
    assert theirs.receive() == (b"before", [])
    data, files = theirs.receive()
    assert data == b"data"
    assert len(files) == num_files
    assert {os.pread(each, 4, 0) for each in files} == {b"seen"}
    for each in [file, *files]:
        os.close(each)


def test_an_end_that_closes_is_seen_after_the_last_frame() -> None:
    mine, theirs = channels()
    mine.send(b"last")
    mine.close()
    assert theirs.is_ready()
    assert theirs.receive()[0] == b"last"
    with pytest.raises(ChannelClosed):
        theirs.receive()
    with pytest.raises(ChannelClosed):
        theirs.send(b"too late")


def test_a_shut_down_ends_a_wait_in_the_same_process() -> None:
    mine, _theirs = channels()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            mine.receive()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    mine.shut_down()
    assert ended.wait(10)


def test_a_wait_ends_with_a_frame_or_with_the_channel_and_takes_nothing() -> None:
    mine, theirs = channel_pair()
    with FrameChannel(theirs) as other, mine:
        other.send(b"first")
        mine.wait()
        mine.wait()  # It is still there.
        assert mine.receive()[0] == b"first"
        other.shut_down()
        mine.wait()
        with pytest.raises(ChannelClosed):
            mine.receive()


def test_a_quiet_channel_is_not_ready() -> None:
    mine, theirs = channels()
    assert not mine.is_ready()
    theirs.send(b"x")
    assert mine.is_ready(10)
    mine.close()
    assert mine.is_ready()  # A receive would not wait, but raise.
