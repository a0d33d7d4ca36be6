"""Requests to workers that are threads here: who gets them, and what happens when one dies."""

import os
import pickle
import socket
import threading
from collections.abc import Callable

import pytest
from testkit.waiting import wait_until

from penstock.engine.channel import ChannelClosed, FrameChannel, channel_pair
from penstock.engine.shared import SharedSegments
from penstock.engine.work import WorkReply, WorkRequest
from penstock.engine.workers import DEPTH, SpawnerClient, WorkerHandle, Workers
from penstock.errors import WorkerError

REQUEST = WorkRequest(samples=[], num_samples=0, targets={}, whole=False)
Answer = Callable[[int, WorkRequest], WorkReply | None]


def make(handle: WorkerHandle) -> tuple[WorkRequest, list[int]]:
    return REQUEST, []


class ThreadSpawner:
    """Stands for the spawner: a worker is a thread that answers, or dies where that is None."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.started: list[int] = []

    def start(self, number: int, end: int) -> None:
        channel = FrameChannel(socket.socket(fileno=os.dup(end)))
        self.started.append(number)
        threading.Thread(target=self._work, args=(number, channel), daemon=True).start()

    def _work(self, number: int, channel: FrameChannel) -> None:
        with channel:
            while True:
                try:
                    reply = self._answer(number, pickle.loads(channel.receive()[0]))
                except ChannelClosed:
                    return
                if reply is None:
                    return
                channel.send(pickle.dumps(reply))

    def pid(self, number: int) -> int | None:
        return 1000 + number

    def status(self, number: int, wait_s: float) -> int | None:
        return -9


def workers_of(answer: Answer, num_workers: int = 1) -> tuple[Workers, ThreadSpawner]:
    spawner = ThreadSpawner(answer)
    return Workers(spawner, SharedSegments(), num_workers), spawner


def test_a_worker_is_started_with_the_first_request_and_kept() -> None:
    workers, spawner = workers_of(lambda number, request: WorkReply(number=number, decode_s=0.5))
    assert workers.num_alive == 0
    for _ in range(3):
        handle, reply = workers.ask(make, "samples")
        assert handle.number == reply.number == 0
    assert spawner.started == [0]
    assert workers.busy_s == 1.5
    workers.close()


def test_another_worker_gets_the_request_of_one_that_died() -> None:
    workers, _ = workers_of(lambda number, request: None if number == 0 else WorkReply())
    handle, _ = workers.ask(make, "samples 1, 2")
    assert handle.number == 1
    assert workers.events == [
        "worker process 1000 was ended by SIGKILL, perhaps for lack of memory; its samples were "
        "made by another"
    ]
    workers.close()


def test_samples_that_kill_every_worker_are_named() -> None:
    workers, spawner = workers_of(lambda number, request: None)
    with pytest.raises(
        WorkerError, match=r"SIGKILL.* while it made samples 1, 2, and so did the 2"
    ):
        workers.ask(make, "samples 1, 2", hint="try another")
    assert spawner.started == [0, 1, 2]
    workers.close()


def test_more_workers_are_started_only_when_all_are_busy() -> None:
    may_answer = threading.Event()

    def answer(number: int, request: WorkRequest) -> WorkReply:
        may_answer.wait(10)
        return WorkReply(number=number)

    workers, spawner = workers_of(answer, num_workers=2)
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.append(workers.ask(make, "samples")[1].number))
        for _ in range(2 * DEPTH)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(spawner.started) == 2)
    may_answer.set()
    for thread in threads:
        thread.join(10)
    assert len(numbers) == 2 * DEPTH
    assert set(numbers) == {0, 1}
    workers.close()


def test_surplus_workers_end_when_they_are_idle() -> None:
    workers, _ = workers_of(lambda number, request: WorkReply(), num_workers=1)
    workers.ask(make, "samples")
    workers.resize(0)
    assert workers.num_alive == 0
    workers.close()


def test_a_thread_that_waits_for_a_worker_ends_with_the_loader() -> None:
    workers, _ = workers_of(lambda number, request: WorkReply(), num_workers=0)
    ended = threading.Event()

    def ask() -> None:
        with pytest.raises(ChannelClosed):
            workers.ask(make, "samples")
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    workers.close()
    assert ended.wait(10)


def test_the_spawner_tells_how_a_worker_ended_and_the_engine_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        threading.Event().wait()  # It must not return; the thread is a daemon.

    monkeypatch.setattr(os, "_exit", end)
    mine, theirs = channel_pair()
    client = SpawnerClient(mine)
    assert client.status(3, wait_s=0) is None
    with FrameChannel(theirs) as spawner:
        spawner.send(pickle.dumps((3, 77, None)))
        spawner.send(pickle.dumps((3, 77, -11)))
        assert client.status(3, wait_s=10) == -11
        assert client.pid(3) == 77
    wait_until(lambda: ended == [1])
