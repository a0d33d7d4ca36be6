"""How long a job waits for a store that does not answer: `deadline_s`, and not several of them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.shaper import Fault, Fixed, Shape, Shaper

import penstock
from penstock.engine.block_cache import BlockCache
from penstock.errors import StoreError, UnavailableError, UnreachableError
from penstock.storage import MemoryStore, ObjectInfo, RetryingStore, RetryPolicy
from penstock.storage.retry import waiting_since
from penstock.testing.faults import WrappedStore

NUM_SAMPLES = 240
BLOB_BYTES = 30_000
DEADLINE_S = 2.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with penstock.Writer(tmp_path / "set", shard_size="1MB") as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"bin": bytes([i]) * BLOB_BYTES})
    (tmp_path / "tier").mkdir()
    return tmp_path / "set"


@pytest.mark.parametrize("timeout_s", [DEADLINE_S, DEADLINE_S / 4])
@pytest.mark.parametrize("way", ["plain", "tier", "half a tier", "blocks"])
def test_a_store_that_falls_silent_is_an_error_after_one_deadline(
    folder: Path, tmp_path: Path, way: str, timeout_s: float
) -> None:
    with Shaper.of_folder(folder, Shape(latency=Fixed(0.005)), seed=7) as shaper:
        options = replace(shaper.options, deadline_s=DEADLINE_S, timeout_s=timeout_s)
        dataset = penstock.open(shaper.uri, store=options, check=False)
        share = {"tier": 1.0, "half a tier": 0.5}.get(way, 0.0)
        size_bytes = int(share * dataset.size_bytes)
        tiers = [penstock.Disk(tmp_path / "tier", size_bytes)] if share else []
        shuffle = "blocks" if way == "blocks" else "global"
        if way == "blocks":  # Few requests bring all of it: none may come through.
            shaper.reshape(Shape(faults=(Fault(kind="stall", stall_s=600),)))
        began_s = time.monotonic()
        with (
            pytest.raises(StoreError, match=r"gave up after \d+ attempt"),
            penstock.Loader(
                dataset, batch_size=16, tiers=tiers, shuffle=shuffle, look_ahead="1MB"
            ) as loader,
        ):
            for number, _ in enumerate(loader):
                began_s = time.monotonic()
                if number == 2:
                    shaper.reshape(Shape(faults=(Fault(kind="stall", stall_s=600),)))
        # One deadline, a moment for threads that hang, and room for a busy machine.
        assert time.monotonic() - began_s < 2 * DEADLINE_S + 1.5


@pytest.mark.parametrize(("shuffle", "share"), [("blocks", 1.0), ("global", 0.3)])
def test_a_request_that_hangs_from_the_beginning_is_asked_for_again(
    folder: Path, shuffle: str, share: float
) -> None:
    """For a minute: only a copy ends this in time, and nothing is known of the store yet."""
    faults = (Fault(kind="stall", share=share, stop_s=0.3, stall_s=60, path="shard-000003"),)
    with Shaper.of_folder(folder, Shape(), seed=3) as shaper:
        patient = replace(shaper.options, timeout_s=100)
        dataset = penstock.open(shaper.uri, store=patient, check=False)
        shaper.reshape(Shape(latency=Fixed(0.005), faults=faults))
        ids = set()
        with penstock.Loader(
            dataset, batch_size=48, epochs=1, shuffle=shuffle, output="numpy"
        ) as loader:
            for batch in loader:
                ids |= set(batch.ids.tolist())
        assert ids == set(range(NUM_SAMPLES))
        assert shaper.counts().faults["stall"] > 0
        assert loader.stats().elapsed_s < 60


class _Hanging(WrappedStore):
    """Fails once and then hangs until it is let go."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.num_calls = 0
        self.let_go = threading.Event()
        self.is_over = threading.Event()

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        self.num_calls += 1
        if self.num_calls == 1:
            raise UnavailableError("503")
        self.let_go.wait()
        self.is_over.set()
        return super().read_range(info, offset, length)

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        target[:] = self.read_range(info, offset, target.nbytes)


def test_an_attempt_that_hangs_is_left_behind_and_writes_nowhere() -> None:
    memory = MemoryStore("hanging")
    info = memory.write("x", b"right")
    hanging = _Hanging(memory)
    store = RetryingStore(hanging, RetryPolicy(deadline_s=1.0, first_wait_s=0.01))
    target = bytearray(5)
    with pytest.raises(UnreachableError, match=r"x: no answer before the deadline.*2 attempts"):
        store.read_into(info, 0, memoryview(target))
    hanging.let_go.set()
    assert hanging.is_over.wait(60), "the attempt that was left behind has not begun"
    assert target == bytes(5)
    memory.clear()


def test_calls_of_one_wait_share_its_deadline() -> None:
    memory = MemoryStore("sharing")
    info = memory.write("x", b"right")
    hanging = _Hanging(memory)
    store = RetryingStore(hanging, RetryPolicy(deadline_s=1000.0, first_wait_s=0.01))
    with waiting_since(time.monotonic() - 999.0):
        began_s = time.monotonic()
        hurried = RetryingStore(hanging, RetryPolicy(deadline_s=4.0, first_wait_s=0.01))
        with pytest.raises(UnreachableError, match="deadline"):
            hurried.read_range(info, 0, 5)
        assert time.monotonic() - began_s < 3.5, "a quarter of 4 s is left, not all of it"
        hanging.let_go.set()
        assert store.read_range(info, 0, 5) == b"right", "and a quarter there always is"
    hanging.let_go.set()
    memory.clear()


def test_whoever_waits_for_a_block_shares_its_error() -> None:
    stage = BlockCache(1000)
    begun, go_on = threading.Event(), threading.Event()
    loads: list[int] = []
    caught: list[BaseException] = []

    def load() -> tuple[str, int]:
        loads.append(1)
        begun.set()
        go_on.wait()
        raise UnavailableError("503")

    def ask() -> None:
        try:
            stage.get("block", load)
        except UnavailableError as error:
            caught.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    begun.wait()
    for thread in threads[1:]:
        thread.start()
    while stage.num_waiting("block") < 2:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    assert (len(loads), len(caught)) == (1, 3)


def test_a_second_copy_of_a_block_does_not_wait_for_the_first() -> None:
    stage = BlockCache(1000)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> tuple[str, int]:
        begun.set()
        go_on.wait()
        return "slow", 4

    found: list[str] = []
    slow = threading.Thread(target=lambda: found.append(stage.get("block", hang)))
    slow.start()
    begun.wait()
    assert stage.get("block", lambda: ("quick", 5), beside=True) == "quick"
    go_on.set()
    slow.join()
    assert found == ["quick"]
    assert stage.size_bytes == 5
