"""Nodes are one cache under every launcher: each byte is read from the store once in the whole job.

Every job here is started as a user would start it, on two nodes that are both this machine. Its
ranks run `launched.py`. The store is far away, as stores are: what other nodes have is nearer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.shaper import Fixed, Shape, Shaper
from tests.loader.torch import launched

import penstock
from penstock.order.stream_hash import StreamHash
from penstock.testing.ports import HOST, free_ports

SCRIPT = Path(launched.__file__)
EXAMPLE = SCRIPT.parents[3] / "examples" / "torchrun_peers.py"
FAR = Shape(latency=Fixed(0.2))
ONCE = 1.05
"""So many times its size is read from the store of what is read once."""
JOB_S = 280.0


class Site:
    """A data set in a store, and what one rank alone is given of it."""

    def __init__(self, folder: Path, shaper: Shaper) -> None:
        dataset = penstock.open(folder)
        self.endpoint = shaper.endpoint
        self.size_bytes = dataset.size_bytes
        self.stream = StreamHash()
        self._shaper = shaper
        sizes = {"global_batch_size": launched.GLOBAL_BATCH_SIZE, "epochs": launched.EPOCHS}
        with penstock.Loader(
            dataset, world=penstock.World(), seed=launched.SEED, **sizes
        ) as loader:
            for b in loader:
                self.stream = self.stream.update(b.epoch, b.positions, b.ids, b.mask)

    @contextmanager
    def reads(self, times: int) -> Iterator[None]:
        """Check that the data set is read so many times, as the store itself counts."""
        before = self._shaper.counts().body_bytes
        yield
        assert self._shaper.counts().body_bytes - before <= times * ONCE * self.size_bytes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Samples that hold nothing but their own number, in a store that takes its time."""
    folder = tmp_path_factory.mktemp("data")
    with penstock.Writer(folder, shard_size="2MB") as writer:
        for number in range(launched.NUM_SAMPLES):
            writer.write({"npy": np.full(16_384, number, np.float32)})
    with Shaper.of_folder(folder, FAR) as shaper:
        yield Site(folder, shaper)


@pytest.fixture
def folder(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that all ranks see, and surroundings that are the same everywhere."""
    (tmp_path / "endpoint").write_text(site.endpoint)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PENSTOCK_NODE", "none")
    monkeypatch.setenv("PENSTOCK_INTERFACE", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run_all(
    folder: Path, commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]] = ()
) -> None:
    """Run commands at the same time, each with variables of its own, and see that all go well."""
    jobs: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log-{number}" for number in range(len(commands))]
    try:
        for number, command in enumerate(commands):
            env = {**os.environ, **(envs[number] if envs else {})}
            with logs[number].open("wb") as log:
                jobs.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [job.wait(timeout=JOB_S) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)


def check(site: Site, folder: Path, name: str, nodes: Sequence[int]) -> None:
    """All ranks together were given what one rank alone is, and read it once or from peers."""
    said = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(len(nodes))]
    summaries = "\n".join(each["summary"] for each in said)
    stream = StreamHash()
    for each in said:
        stream = stream.merge(StreamHash(**each["stream"]))
    assert stream == site.stream
    assert [each["node"] for each in said] == list(nodes)
    assert sum(each["store_bytes"] for each in said) <= ONCE * site.size_bytes, summaries
    assert sum(each["peer_bytes"] for each in said) > 0, summaries


def agent(way: str, folder: Path, port: int, *options: str) -> list[str]:
    """Return the command that starts two ranks on one of two nodes."""
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{port}", f"--rdzv-id={way}"]
    command += ["--monitor-interval=0.1", f"--local-addr={HOST}", *options]
    return [*command, str(SCRIPT), way, str(folder)]


# -- torchrun ----------------------------------------------------------------------------------


def test_torchrun_with_a_process_group_and_without(site: Site, folder: Path) -> None:
    with site.reads(times=2):
        run_all(folder, [agent("torchrun", folder, free_ports(1)[0])] * 2)
    check(site, folder, "without", [0, 0, 1, 1])
    check(site, folder, "with", [0, 0, 1, 1])


def test_torchrun_starts_again_and_goes_on(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else torch finds the group's old addresses in a store that outlived it; see the guide.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = agent("restarted", folder, free_ports(1)[0], "--max-restarts=1")
    with site.reads(times=1):
        run_all(folder, [command] * 2)
    assert len(list(folder.glob("restarted-saved-*.json"))) == 4
    check(site, folder, "restarted", [0, 0, 1, 1])


def test_the_example_starts_two_nodes_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    run_all(folder, [[str(EXAMPLE)]])
    said = (folder / "log-0").read_text()
    assert "times the data set from the store" in said
    # What one rank is given: the example on one node would say the same.
    assert "576 samples, 30a51b297a998bf4" in said


# -- Accelerate --------------------------------------------------------------------------------


def test_accelerate_launch(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))  # Where a user's own defaults lie.
    # The launcher for GPUs is the one that starts several processes; they need not have any.
    command = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=2"]
    command += ["--num_processes=4", f"--main_process_ip={HOST}"]
    command += [f"--main_process_port={free_ports(1)[0]}", "--mixed_precision=no"]
    command += ["--dynamo_backend=no"]
    rest = [str(SCRIPT), "accelerate", str(folder)]
    with site.reads(times=1):
        run_all(folder, [[*command, f"--machine_rank={rank}", *rest] for rank in range(2)])
    check(site, folder, "accelerate", [0, 0, 1, 1])


# -- Slurm, MPI --------------------------------------------------------------------------------


def slurm(rank: int, local_rank: int, node: int, per_node: Sequence[int]) -> dict[str, str]:
    said = {"PROCID": rank, "LOCALID": local_rank, "NODEID": node, "JOB_ID": 71, "STEP_ID": 0}
    said |= {"STEP_NUM_TASKS": sum(per_node), "STEP_NUM_NODES": len(per_node)}
    text = {f"SLURM_{name}": str(value) for name, value in said.items()}
    return {**text, "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, per_node))}


def open_mpi(rank: int, local_rank: int, node: int, per_node: Sequence[int]) -> dict[str, str]:
    said = {"RANK": rank, "SIZE": sum(per_node), "LOCAL_RANK": local_rank}
    said |= {"LOCAL_SIZE": per_node[node]}
    text = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}
    return {**text, "PMIX_NAMESPACE": "prterun-host-71@1"}


def intel_mpi(rank: int, local_rank: int, node: int, per_node: Sequence[int]) -> dict[str, str]:
    said = {"PMI_RANK": rank, "PMI_SIZE": sum(per_node), "MPI_LOCALRANKID": local_rank}
    return {
        name: str(value) for name, value in (said | {"MPI_LOCALNRANKS": per_node[node]}).items()
    }


@pytest.mark.parametrize(
    ("variables", "per_node"), [(slurm, [1, 2]), (open_mpi, [2, 2]), (intel_mpi, [1, 1])]
)
def test_programs_without_torch_meet_in_a_folder(
    site: Site,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: Any,
    per_node: list[int],
) -> None:
    monkeypatch.setenv("PENSTOCK_RENDEZVOUS", str(folder / "meet"))
    places = [(local, node) for node, count in enumerate(per_node) for local in range(count)]
    envs = [variables(rank, *place, per_node) for rank, place in enumerate(places)]
    with site.reads(times=1):
        run_all(folder, [[str(SCRIPT), "plain", str(folder)]] * len(envs), envs)
    check(site, folder, "plain", [node for _, node in places])


RAY_HERE = "PENSTOCK_TESTS_RAY_HERE"

# -- Ray Train ---------------------------------------------------------------------------------


@pytest.fixture
def ray_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes; Ray Train tells them apart by their addresses."""
    ray = pytest.importorskip("ray", reason="pip install 'penstock[ray]'")
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster.add_node(**node, include_dashboard=False)
    cluster.add_node(**node, node_ip_address="127.0.0.2")
    ray.cloudpickle.register_pickle_by_value(launched)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    cluster.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(launched)


@pytest.mark.timeout(900)  # Ray starts some twenty processes, which other tests slow down.
def test_ray_train_starts_again_and_goes_on() -> None:
    """In a process of its own: what Ray leaves behind in one may crash children forked from it."""
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    answer = subprocess.run(
        [*command, "-k", "ray_train_here", "--timeout=840"],
        env=os.environ | {RAY_HERE: "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=870,
    )
    assert answer.returncode == 0, answer.stdout[-10_000:] + answer.stderr[-2_000:]
    assert "1 passed" in answer.stdout


@pytest.mark.skipif(RAY_HERE not in os.environ, reason="is run by the test above")
@pytest.mark.usefixtures("ray_cluster")
def test_ray_train_here(site: Site, folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        launched.ray,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=1)
        ),
    )
    with site.reads(times=1):
        trainer.fit()
    assert len(list(folder.glob("ray-saved-*.json"))) == 2
    check(site, folder, "ray", [0, 1])
