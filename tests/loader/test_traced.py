"""What a traced run records: every kind of work, with the bytes that the loader has counted."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.shaper import Fault, Fixed, Shape, Shaper

import penstock
from penstock import Disk, Memory, World
from penstock.engine.serving import LocalTierServer
from penstock.storage import open_store
from penstock.trace import Flag, Kind, Trace, read_trace
from penstock.trace.clocks import FACT

from .conftest import MakeRows, write_tar

BLOB_BYTES = 70_000
NUM_BLOBS = 96


def by_source(trace: Trace, kind: Kind) -> dict[str, tuple[int, int]]:
    """Return bytes and reads of each source, as rows of one kind have them."""
    out: dict[str, tuple[int, int]] = {}
    for row in trace.of(kind):
        if row["flags"] & Flag.ERROR:
            assert row["size_bytes"] == 0
            continue
        name = trace.name_of(row["source"])
        size_bytes, count = out.get(name, (0, 0))
        out[name] = size_bytes + int(row["size_bytes"]), count + int(row["count"])
    return out


def assert_complete(trace: Trace, stats: penstock.Stats) -> None:
    """Fail unless rows have exactly the bytes and reads that were counted."""
    found = by_source(trace, Kind.FETCH) | by_source(trace, Kind.TIER_READ)
    peers = by_source(trace, Kind.PEER_REQUEST).values()
    if peers:
        found["peers"] = sum(b for b, _ in peers), sum(n for _, n in peers)
    counted = {name: (s.size_bytes, s.requests) for name, s in stats.sources.items()}
    assert found == counted


def steps_of(trace: Trace, kind: Kind) -> set[tuple[int, int]]:
    rows = trace.of(kind)
    return set(zip(rows["epoch"].tolist(), rows["step"].tolist(), strict=True))


def negative(sample: dict[str, Any]) -> dict[str, Any]:
    return {"head": 255 - np.frombuffer(sample["bin"], np.uint8)[:64]}


@pytest.fixture
def far(s3: Any, tmp_path: Path) -> Callable[[], penstock.Dataset]:
    """96 samples of 70 kB in three tars on a real server."""
    store = open_store(s3.uri, s3.options)
    for shard in range(3):
        samples = [{"bin": bytes([shard * 32 + i]) * BLOB_BYTES} for i in range(32)]
        path = tmp_path / "far" / f"x-{shard}.tar"
        write_tar(path, samples, shard * 32)
        store.write(f"far/{path.name}", path.read_bytes())
    return lambda: penstock.open(f"{s3.uri.rstrip('/')}/far/", store=s3.options)


@pytest.mark.parametrize("workers", [1, "here"])
def test_every_kind_of_work_is_recorded(
    far: Callable[[], penstock.Dataset], tmp_path: Path, workers: Any
) -> None:
    tiers = [Memory("2MB"), Disk(tmp_path / "tier", "1GB")]
    (tmp_path / "tier").mkdir()
    with penstock.Loader(
        far(),
        batch_size=16,
        epochs=2,
        output="numpy",
        transform=negative,
        tiers=tiers,
        workers=workers,
        trace=tmp_path / "run",
    ) as loader:
        for batch in loader:
            assert batch.to("cpu") is not batch
    stats = loader.stats()  # Not before: what is under way is counted as it comes.
    trace = read_trace(tmp_path / "run")
    assert_complete(trace, stats)
    all_steps = {(epoch, step) for epoch in range(2) for step in range(6)}
    for kind in (Kind.NEXT, Kind.PLAN, Kind.DECODE, Kind.TRANSFORM, Kind.JOIN, Kind.HAND_OVER):
        assert steps_of(trace, kind) == all_steps, kind
    assert steps_of(trace, Kind.COPY) == all_steps
    for kind in (Kind.NEXT, Kind.DECODE, Kind.TRANSFORM):
        assert trace.of(kind)["count"].sum() == 2 * NUM_BLOBS, kind
    assert trace.of(Kind.DECODE)["size_bytes"].sum() == 2 * NUM_BLOBS * BLOB_BYTES
    assert (trace.of(Kind.DECODE)["cpu_ns"] > 0).all()
    assert (trace.of(Kind.HAND_OVER)["duration_ns"] >= 0).all()
    assert trace.of(Kind.FETCH)["size_bytes"].sum() >= NUM_BLOBS * BLOB_BYTES
    fills = by_source(trace, Kind.TIER_FILL)
    assert {tier.source: tier.held_bytes for tier in stats.tiers} == {
        name: size_bytes for name, (size_bytes, _) in fills.items()
    }
    [index] = trace.of(Kind.INDEX)
    assert index["count"] == NUM_BLOBS
    maker = {"here": "train"}.get(workers, "worker")
    roles = {trace.processes[p].role for p in trace.of(Kind.DECODE)["process"]}
    assert roles == {maker}
    assert_facts(trace, stats)


def assert_facts(trace: Trace, stats: penstock.Stats) -> None:
    facts = trace.facts(0)
    assert facts["loader"] == "penstock"
    assert (facts["batch_size"], facts["epochs"], facts["world_size"]) == (16, 2, 1)
    assert (facts["num_samples"], facts["num_files"], facts["store"]) == (NUM_BLOBS, 3, "s3")
    assert facts["sample_bytes"]["mean"] == BLOB_BYTES
    assert facts["cores"] > 0
    assert facts["memory_bytes"] > 1 << 20
    assert [tier["held_bytes"] for tier in facts["tiers"]] == [0, 0]
    held = [tier["held_bytes"] for tier in facts["tiers_at_end"]]
    assert held == [tier.held_bytes for tier in stats.tiers]
    assert facts["final_stats"]["store_bytes"] == stats.store_bytes
    assert facts["bound_bytes"] == stats.bound_bytes
    for process in trace.processes:
        if process.role in ("train", "engine"):
            first = process.counters[0][1]
            assert first["memory.rss_bytes"] > 1 << 20
            assert first["cpu.user_s"] >= 0
    assert any("node.cores" in values for p in trace.processes for _, values in p.counters)


@pytest.mark.parametrize("workers", [1, "here"])
@pytest.mark.parametrize("what", ["rows", "blobs"])
def test_local_reads_are_complete(
    make_rows: MakeRows, blobs: penstock.Dataset, tmp_path: Path, workers: Any, what: str
) -> None:
    dataset = make_rows(40_000) if what == "rows" else blobs
    with penstock.Loader(
        dataset, batch_size=len(dataset) // 2, workers=workers, trace=tmp_path / "run"
    ) as loader:
        for _ in loader:
            pass
    stats = loader.stats()
    trace = read_trace(tmp_path / "run")
    assert_complete(trace, stats)
    fetches = trace.of(Kind.FETCH)
    names = set(trace.names_of(fetches["object"]))
    assert names <= ({"rows.npy"} if what == "rows" else {f"x-00{i}.tar" for i in range(3)})
    assert (fetches["offset"] >= 0).all()


def test_failed_attempts_are_rows_without_bytes(tmp_path: Path) -> None:
    with penstock.Writer(tmp_path / "set", shard_size="1MB") as writer:
        for i in range(64):
            writer.write({"bin": bytes([i]) * BLOB_BYTES})
    with Shaper.of_folder(tmp_path / "set", Shape(), seed=7) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(Shape(faults=(Fault(kind="unavailable", share=0.3),)))
        with penstock.Loader(
            dataset, batch_size=8, workers="here", trace=tmp_path / "run"
        ) as loader:
            for _ in loader:
                pass
        stats = loader.stats()
        num_refused = sum(shaper.counts().faults.values())
    trace = read_trace(tmp_path / "run")
    assert_complete(trace, stats)
    fetches = trace.of(Kind.FETCH)
    failed = fetches[(fetches["flags"] & Flag.ERROR) != 0]
    assert len(failed) == num_refused > 0
    assert fetches["attempt"].max() >= 1
    # Each failed attempt is followed by the next one for the same bytes.
    for row in failed:
        same = (fetches["object"] == row["object"]) & (fetches["offset"] == row["offset"])
        assert row["attempt"] + 1 in fetches[same]["attempt"]


def test_a_second_copy_of_a_late_request_is_a_hedge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the folder's conftest switches off for other tests: copies of late requests.
    monkeypatch.undo()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with penstock.Writer(tmp_path / "set", shard_size="4MB") as writer:
        for i in range(240):
            writer.write({"bin": bytes([i]) * 66_000})
    shape = Shape(latency=Fixed(0.005), faults=(Fault(kind="stall", share=0.01, stall_s=60),))
    with Shaper.of_folder(tmp_path / "set", Shape(), seed=3) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(shape)
        with penstock.Loader(
            dataset, batch_size=16, epochs=2, workers="here", trace=tmp_path / "run"
        ) as loader:
            for _ in loader:
                pass
        assert shaper.counts().faults
    fetches = read_trace(tmp_path / "run").of(Kind.FETCH)
    hedges = fetches[(fetches["flags"] & Flag.HEDGE) != 0]
    assert len(hedges) > 0
    assert (hedges["step"] >= 0).all()


def test_both_sides_of_a_request_to_a_peer_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_ns = 5_000_000_000
    told = LocalTierServer._status
    monkeypatch.setattr(
        LocalTierServer,
        "_status",
        lambda self, run: (s := told(self, run)) | {"clock_ns": int(str(s["clock_ns"])) + ahead_ns},
    )
    samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in range(NUM_BLOBS)]
    write_tar(tmp_path / "large" / "x.tar", samples)

    def go(rank: int) -> penstock.Stats:
        (tmp_path / f"node{rank}").mkdir()
        with penstock.Loader(
            penstock.open(tmp_path / "large"),
            global_batch_size=16,
            epochs=2,
            world=World(rank=rank, num_ranks=2, num_nodes=2),
            peers=str(tmp_path / "meet"),
            tiers=[Disk(tmp_path / f"node{rank}", "1GB")],
            workers="here",
            trace=tmp_path / f"run{rank}",
        ) as loader:
            for _ in loader:
                pass
        return loader.stats()

    with ThreadPoolExecutor(2) as pool:
        stats = list(pool.map(go, range(2)))
    traces = [read_trace(tmp_path / f"run{rank}") for rank in range(2)]
    for trace, one in zip(traces, stats, strict=True):
        assert_complete(trace, one)
    for mine, other in ((0, 1), (1, 0)):
        asked, served = traces[mine].of(Kind.PEER_REQUEST), traces[other].of(Kind.PEER_SERVE)
        assert asked["size_bytes"].sum() == stats[mine].peer_bytes > 0
        assert set(traces[mine].names_of(asked["source"])) == {f"peer:{other}"}
        assert served["size_bytes"].sum() == asked["size_bytes"].sum()
        assert set(traces[other].names_of(served["source"])) == {f"peer:{mine}"}
    # The second node has compared its clock with the first one's, at both ends of the run.
    assert FACT not in traces[0].facts(0)
    readings = traces[1].facts(1)[FACT]
    assert len(readings) >= 1
    for _, offset_ns, error_ns in readings:
        assert abs(offset_ns - ahead_ns) <= error_ns


def test_a_pass_over_another_loader_without_gradients_is_validation(
    blobs: penstock.Dataset, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")

    def loader(batch_size: int) -> penstock.Loader:
        return penstock.Loader(
            blobs, batch_size=batch_size, workers="here", shuffle=None, trace=tmp_path / "run"
        )

    with loader(100) as training, loader(50) as checking:
        for _ in training:
            with torch.no_grad():
                for number, _ in enumerate(checking):
                    if number == 2:
                        break
    trace = read_trace(tmp_path / "run")
    assert trace.of(Kind.NEXT)["step"].tolist() == [0, 1, 2]
    assert trace.of(Kind.VALIDATE)["count"].tolist() == [3, 3, 3]
    assert len(set(trace.names_of(trace.of(Kind.NEXT, Kind.VALIDATE)["object"]))) == 2


class Killed:
    """Ends the process that runs it, without a chance to clean up, once."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) == 250 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"cls": sample["cls"]}


def test_rows_of_a_killed_worker_and_a_killed_engine_are_there(
    blobs: penstock.Dataset, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with penstock.Loader(
        blobs,
        batch_size=30,
        shuffle=None,
        workers=1,
        look_ahead=1,
        transform=Killed(tmp_path / "flag"),
        trace=run,
    ) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        client = loader._client
        assert client is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        while Path(f"/proc/{client.engine_pid}/status").exists():
            time.sleep(0.01)
        at_kill = read_trace(run)
        assert {(0, step) for step in range(4)} <= steps_of(at_kill, Kind.JOIN)
        assert {(0, step) for step in range(4)} <= steps_of(at_kill, Kind.DECODE)
        assert len(list(batches)) == 6
    trace = read_trace(run)
    assert steps_of(trace, Kind.NEXT) == {(0, step) for step in range(10)}
    roles = [process.role for process in trace.processes]
    assert roles.count("engine") == 2
    assert roles.count("worker") == 3
    assert len(trace.of(Kind.PLAN)) >= 10
