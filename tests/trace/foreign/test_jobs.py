"""What `penstock trace` records of torch's DataLoader: real jobs, which know nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.trace.foreign import jobs
from tests.trace.foreign.jobs import BATCH, NUM_FILES, SAMPLE_BYTES

from penstock.trace import Flag, Kind, Trace, read_trace

FILE_BYTES = sum(1000 + 37 * index for index in range(NUM_FILES))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    jobs.make(str(folder / "made"))
    return folder / "made"


def traced(
    run: Path, *command: str, options: tuple[str, ...] = (), status: int = 0
) -> tuple[Trace, list[Any]]:
    """Run a command under `penstock trace`; return the trace and the JSON lines it printed."""
    verb = [sys.executable, "-m", "penstock.cli.main", "trace", "--out", str(run), *options, "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*verb, *command], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == status, done.stderr
    assert not (run / "problems.txt").exists(), (run / "problems.txt").read_text()
    return read_trace(run), [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]


def reads_of(trace: Trace, ending: str) -> Any:
    """Return the READ rows of files whose names end like this."""
    wanted = [n for n, name in enumerate(trace.names) if name.endswith(ending)]
    reads = trace.of(Kind.READ)
    return reads[np.isin(reads["object"], wanted)]


def bytes_by_worker(trace: Trace, made: Any) -> dict[int, int]:
    """Return the bytes of files that each process read which made some batches, by its id."""
    reads = reads_of(trace, ".bin")
    out: dict[int, int] = {}
    for pid in {trace.processes[p].pid for p in made["process"].tolist()}:
        numbers = [p.number for p in trace.processes if p.pid == pid and p.role == "native"]
        out[pid] = int(reads[np.isin(reads["process"], numbers)]["size_bytes"].sum())
    return out


@pytest.fixture(scope="module")
def many(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[str, Any]]:
    run = tmp_path_factory.mktemp("runs") / "many"
    trace, printed = traced(run, sys.executable, jobs.__file__, "many", str(data))
    return trace, printed[0]


def loader_named(trace: Trace, number: int) -> int:
    found = [n for n, name in enumerate(trace.names) if name.startswith(f"loader {number} (")]
    return found[0]


def test_every_batch_is_a_row_with_its_wait_and_size(many: tuple[Trace, dict[str, Any]]) -> None:
    trace, got = many
    batches = trace.of(Kind.NEXT)
    a_pass = NUM_FILES // BATCH
    fork = batches[batches["object"] == loader_named(trace, 0)]
    assert fork["step"].tolist() == list(range(2 * a_pass))
    assert fork["epoch"].tolist() == [0] * a_pass + [1] * a_pass
    assert (fork["count"] == BATCH).all()
    assert (fork["wait_ns"] > 0).all()
    assert (fork["wait_ns"] <= fork["duration_ns"]).all()
    shard = batches[batches["object"] == loader_named(trace, 3)]
    assert shard["size_bytes"].sum() == got["shard"] == NUM_FILES * SAMPLE_BYTES


def test_reads_are_complete_and_belong_to_the_worker_that_made_them(
    many: tuple[Trace, dict[str, Any]],
) -> None:
    trace, got = many
    made = trace.of(Kind.BATCH)
    read_bytes = bytes_by_worker(trace, made)
    seen: dict[str, dict[tuple[int, tuple[int, ...]], int]] = {"fork": {}, "persistent": {}}
    for process in trace.processes:
        own = made[made["process"] == process.number]
        if process.role != "worker" or "__main__.Files" not in trace.names_of(own["object"]):
            continue
        epochs = tuple(sorted(set(own["epoch"].tolist())))
        loader = "persistent" if len(epochs) == 2 else "fork"
        seen[loader][process.facts["worker"], epochs] = read_bytes[process.pid]
    assert seen["persistent"] == {(0, (0, 1)): sum(got["persistent"]["0"])}
    assert seen["fork"] == {
        (worker, (epoch,)): got["fork"][str(worker)][epoch] for worker in (0, 1) for epoch in (0, 1)
    }


def test_every_byte_of_every_file_is_seen_once_for_each_reading(
    many: tuple[Trace, dict[str, Any]],
) -> None:
    trace, _ = many
    files = trace.of(Kind.READ)
    names = [n for n, name in enumerate(trace.names) if "/files/" in name]
    seen = files[np.isin(files["object"], names)]
    passes = 2 + 2 + 1  # fork, persistent, in the training process
    assert seen["size_bytes"].sum() == passes * FILE_BYTES
    # The read by which Python finds the end of a file is no request.
    assert len(seen) == passes * NUM_FILES
    assert (seen["offset"] == 0).all()
    assert (seen["flags"] & Flag.NATIVE == Flag.NATIVE).all()


def test_offsets_of_one_shard_are_those_that_were_read(
    many: tuple[Trace, dict[str, Any]],
) -> None:
    trace, got = many
    reads = reads_of(trace, "shard.bin")
    starts = [index * SAMPLE_BYTES for index in range(NUM_FILES)]
    # Once by pread from one worker, once by seek and read from two.
    assert sorted(reads["offset"].tolist()) == sorted(starts * 2)
    assert reads["size_bytes"].sum() == got["shard"] + got["stream"]


def test_an_archive_takes_several_reads(many: tuple[Trace, dict[str, Any]]) -> None:
    trace, got = many
    reads = reads_of(trace, ".npz")
    assert len(reads) > 2 * 4
    assert reads["size_bytes"].sum() >= got["npz"]


def test_a_mapped_file_is_named_and_the_report_says_what_is_not_seen(
    many: tuple[Trace, dict[str, Any]],
) -> None:
    trace, _ = many
    maps = trace.of(Kind.MAP)
    assert any(name.endswith("array.npy") for name in trace.names_of(maps["object"]))
    tracing = trace.facts()["tracing"]
    assert tracing["python"]
    assert tracing["preload"]
    assert any("mapping" in sentence for sentence in tracing["cannot_see"])


def test_workers_say_which_step_a_batch_is_for_and_what_it_cost(
    many: tuple[Trace, dict[str, Any]],
) -> None:
    trace, _ = many
    made = trace.of(Kind.BATCH)
    fork = {p.number for p in trace.processes if p.role == "worker"}
    made = made[np.isin(made["process"], list(fork))]
    given = trace.of(Kind.NEXT)
    given = given[given["object"] == loader_named(trace, 0)]
    first = made[: len(given)]  # The first loader's batches were made first.
    assert sorted(first["step"].tolist()) == given["step"].tolist()
    end_ns = {
        int(s): e
        for s, e in zip(given["step"], given["start_ns"] + given["duration_ns"], strict=True)
    }
    assert all(row["start_ns"] + row["duration_ns"] <= end_ns[int(row["step"])] for row in first)
    assert (made["cpu_ns"] > 0).all()
    assert len(trace.of(Kind.COLLATE)) == len(trace.of(Kind.BATCH))
    assert len(trace.of(Kind.SAMPLE)) > 0


def test_facts_describe_the_loader_and_the_machine(many: tuple[Trace, dict[str, Any]]) -> None:
    facts = many[0].facts()
    assert facts["loader"] == "torch"
    assert (facts["num_workers"], facts["batch_size"], facts["shuffle"]) == (2, BATCH, True)
    assert (facts["start_method"], facts["num_samples"]) == ("fork", NUM_FILES)
    assert facts["cores"] >= 1
    assert "torch" in facts["framework"]


def test_workers_that_are_interpreters_of_their_own_are_seen(data: Path, tmp_path: Path) -> None:
    trace, printed = traced(tmp_path / "run", sys.executable, jobs.__file__, "started", str(data))
    assert printed[0] == {"spawn": {"0": [FILE_BYTES]}, "forkserver": {"0": [FILE_BYTES]}}
    made = trace.of(Kind.BATCH)
    assert list(bytes_by_worker(trace, made).values()) == [FILE_BYTES, FILE_BYTES]
    assert sorted(made["step"].tolist()) == sorted(2 * list(range(NUM_FILES // BATCH)))
    assert {p.role for p in trace.processes} == {"launch", "train", "worker", "native"}


def test_a_killed_worker_leaves_what_it_read(data: Path, tmp_path: Path) -> None:
    trace, printed = traced(tmp_path / "run", sys.executable, jobs.__file__, "killed", str(data))
    assert "error" in printed[0]
    reads = reads_of(trace, ".bin")
    assert reads["size_bytes"].sum() == sum(1000 + 37 * index for index in range(18))
    assert sorted(trace.of(Kind.BATCH)["step"].tolist()) == list(range(18 // BATCH))
    # torch raises in a signal handler, perhaps between the row of a batch and its count.
    assert len(trace.of(Kind.NEXT)) - printed[0]["batches"] in {0, 1}


def test_ranks_of_torchrun_are_told_apart(data: Path, tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    trace, printed = traced(tmp_path / "run", *torchrun, jobs.__file__, "ranks", str(data))
    assert sorted(line["rank"] for line in printed) == [0, 1]
    assert trace.ranks == (0, 1)
    reads = reads_of(trace, "shard.bin")
    for rank in (0, 1):
        assert len(trace.of(Kind.NEXT, rank=rank)) == 2 * NUM_FILES // 4
        own = reads[reads["rank"] == rank]
        assert own["size_bytes"].sum() == NUM_FILES * SAMPLE_BYTES  # Half of it, twice.
        # The loader that the optimizer never stepped beside is no training.
        assert trace.of(Kind.VALIDATE, rank=rank)["count"].tolist() == [2, 2]
        assert len(trace.of(Kind.COMMUNICATE, rank=rank)) > 0
    assert trace.facts(1)["world_size"] == 2
    saved = trace.of(Kind.CHECKPOINT)
    assert saved["rank"].tolist() == [0, 0]
    assert (saved["size_bytes"] > 4 * SAMPLE_BYTES * 4).all()
    # Gradients travel over connections of torch; they are no data.
    assert not (trace.of(Kind.READ)["flags"] & Flag.SOCKET).any()


@pytest.mark.parametrize("view", ["python", "strace"])
def test_other_views_see_less_and_say_so(view: str, data: Path, tmp_path: Path) -> None:
    if view == "strace" and not _has_strace():
        pytest.skip("strace is not installed, or may not trace here")
    trace, _ = traced(
        tmp_path / "run", sys.executable, jobs.__file__, "killed", str(data),
        options=("--with", view),
    )  # fmt: skip
    tracing = trace.facts()["tracing"]
    assert (tracing["preload"], tracing["strace"]) == (False, view == "strace")
    assert any("lock" in sentence for sentence in tracing["cannot_see"])
    assert (trace.of(Kind.LAUNCH)["lock_ns"] == -1).all()
    opened = {Path(name).name for name in trace.names_of(trace.of(Kind.OPEN)["object"])}
    assert {f"{index}.bin" for index in range(18)} <= opened
    whole = sum(1000 + 37 * index for index in range(18))
    if view == "strace":
        reads = reads_of(trace, ".bin")
        assert reads["size_bytes"].sum() == whole
        assert (reads["offset"] == 0).all()
        # Nobody counts them a second time, and they are reads of the processes of the job.
        files = trace.of(Kind.READ)
        assert set(trace.names_of(files["object"])) == set(trace.names_of(reads["object"]))
        pids = {p.pid for p in trace.processes if p.role != "native"}
        assert {trace.processes[n].pid for n in reads["process"].tolist()} <= pids
    else:
        # Sums of batches: the one that was not finished is missing.
        read = trace.of(Kind.READ)["size_bytes"].tolist()
        assert sum(read) == sum(1000 + 37 * index for index in range(16))
        assert len(read) == 16 // BATCH


def test_differential_windows_hand_the_same_batch_out_again(data: Path, tmp_path: Path) -> None:
    trace, printed = traced(
        tmp_path / "run", sys.executable, jobs.__file__, "plain", str(data),
        options=("--differential", "2"),
    )  # fmt: skip
    resident = (trace.of(Kind.NEXT)["flags"] & Flag.RESIDENT) != 0
    # Six real batches; the pass ends when the loader is asked for a seventh.
    assert resident.tolist() == [False, False, True, True] * 3
    assert printed[0]["batches"] == len(resident)
    assert reads_of(trace, ".bin")["size_bytes"].sum() == FILE_BYTES


def _has_strace() -> bool:
    try:
        done = subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
