"""Indexing and packing on a Ray cluster of two nodes: the same code, the same bytes, and deaths."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.dataset import ray_crew
from penstock.dataset.build import BuildProgress
from penstock.dataset.build_scan import unit_name
from penstock.dataset.crew import ThreadCrew
from penstock.dataset.formats.tar import TarFormat
from penstock.dataset.open import look_up, write_index
from penstock.dataset.pack import PackOptions, pack
from penstock.dataset.ray_crew import RayCrew
from penstock.errors import FormatError, MissingPackageError, OptionError, WorkerError
from penstock.storage.locate import open_store

ray = pytest.importorskip("ray", reason="pip install 'penstock[ray]'")
OBJECT_STORE_BYTES = 80 << 20
SOON_NOTICED = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}
"""A node whose process is gone is missed within a second; one that is slow is not."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes with one processor each, whose workers have caches of their own."""
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Paths of sockets are short, those of pytest's folders are not.
    folder = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("head")))
        cluster = Cluster()
        cluster.add_node(**node(), include_dashboard=False, _system_config=SOON_NOTICED)
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("second")))
        cluster.add_node(**node())
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    shutil.rmtree(folder, ignore_errors=True)


def node() -> dict[str, Any]:
    return {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def crew(cluster: Any) -> Iterator[RayCrew]:
    with RayCrew(cluster.address) as crew:
        yield crew


def tar_bytes(first: int, count: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i in range(first, first + count):
            member = tarfile.TarInfo(f"{i:06}.txt")
            data = f"sample {i}".encode() * (1 + i % 3)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def make_shards(folder: Path, count: int) -> Path:
    folder.mkdir()
    for shard in range(count):
        (folder / f"x-{shard:03}.tar").write_bytes(tar_bytes(shard * 10, 10))
    return folder


def parts(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / ".penstock/all/parts").glob("*.idx")}


def test_an_index_is_the_same_file_as_without_ray(crew: RayCrew, tmp_path: Path) -> None:
    one = make_shards(tmp_path / "one", 40)
    two = Path(shutil.copytree(one, tmp_path / "two"))
    write_index(look_up(one), crew=crew)
    write_index(look_up(two))
    assert parts(one) == parts(two)
    assert not list((one / ".penstock").rglob("work/*/*")), "work is cleared after the commit"
    for folder in (one, two):
        (folder / "y.tar").write_bytes(tar_bytes(400, 7))
        os.utime(folder / "y.tar", ns=(5, 5))
    by_ray, plain = write_index(look_up(one), crew=crew)[1], write_index(look_up(two))[1]
    assert (by_ray.version, by_ray.fingerprint) == (plain.version, plain.fingerprint)
    assert parts(one) == parts(two)


def test_a_set_in_s3_is_indexed_by_workers_and_read_by_everybody(crew: RayCrew, s3: Any) -> None:
    store = open_store(s3.uri, s3.options)
    for shard in range(6):
        store.write(f"x-{shard}.tar", tar_bytes(shard * 10, 10))
    found = look_up(s3.uri, store=s3.options)
    _, by_ray = write_index(found, crew=crew)
    _, plain = write_index(found, rebuild=True)
    assert by_ray == plain, "the same bytes have the same name, and are the same version"
    assert not list(store.list(".penstock/work/"))
    assert len(penstock.open(s3.uri, store=s3.options)) == 60


def test_packed_shards_are_the_same_bytes_as_without_ray(crew: RayCrew, tmp_path: Path) -> None:
    source = make_shards(tmp_path / "source", 20)
    options = PackOptions(shard_size="8KB", shuffle=3)
    reports = [
        pack(source, tmp_path / name, options, crew=who)
        for name, who in (("ray", crew), ("plain", ThreadCrew()))
    ]
    by_ray, plain = (
        {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.tar")}
        for name in ("ray", "plain")
    )
    assert by_ray == plain
    assert reports[0].num_shards == reports[1].num_shards == len(plain) > 10
    one, two = (penstock.open(tmp_path / name) for name in ("ray", "plain"))
    assert one.fingerprint == two.fingerprint
    assert not list((tmp_path / "ray/.penstock/pack").rglob("*.*")), "the job is forgotten"
    assert penstock.verify(tmp_path / "ray").ok


def test_a_bad_shard_is_named_as_without_ray(crew: RayCrew, tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "set", 12)
    (folder / "x-007.tar").write_bytes(b"no tar at all, but long enough for a header" * 40)
    with pytest.raises(FormatError) as plain:
        write_index(look_up(folder))
    with pytest.raises(FormatError) as by_ray:
        write_index(look_up(folder), crew=crew)
    assert "x-007.tar" in str(plain.value)
    assert str(by_ray.value) == str(plain.value)
    assert not (folder / ".penstock/all").exists()


def test_a_bad_sample_leaves_the_destination_free(crew: RayCrew, tmp_path: Path) -> None:
    source = make_shards(tmp_path / "source", 3)
    with pytest.raises(OptionError, match="numbers of one shape"):
        pack(source, tmp_path / "out", PackOptions(format="npy"), crew=crew)
    assert not list((tmp_path / "out").rglob("*.*"))


def test_the_command_works_on_the_cluster_that_it_is_given(cluster: Any, tmp_path: Path) -> None:
    source = make_shards(tmp_path / "source", 12)
    command = [sys.executable, "-m", "penstock.cli.main", "pack", str(source)]
    command += [str(tmp_path / "out"), "--shard-size", "8KB", "--json", "--ray", cluster.address]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["num_samples"] == 120
    said = [line for line in ended.stderr.splitlines() if not line.startswith("packing: ")]
    assert not said, "Ray has nothing to say to the user"
    pack(source, tmp_path / "plain", PackOptions(shard_size="8KB"))
    by_ray, plain = (penstock.open(tmp_path / name) for name in ("out", "plain"))
    assert by_ray.fingerprint == plain.fingerprint


# -- deaths -----------------------------------------------------------------------------------


def lost_once(job: tuple[str, str], item: int) -> tuple[int, str]:
    """Return where an item was done.

    The nodes named in the job wait for another one to begin, and the first item there never ends.
    """
    here, mark = ray.get_runtime_context().get_node_id(), Path(job[0], "begun")
    if here in job[1]:
        wait_for(mark)
    elif not mark.exists():
        mark.with_suffix(".new").write_text(f"{os.getpid()} {item}")
        mark.with_suffix(".new").rename(mark)
        signal.pause()
    return item, here


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def head_id(cluster: Any) -> str:
    return str(cluster.head_node.node_id)


def test_a_worker_that_is_killed_at_work_is_replaced(
    cluster: Any, crew: RayCrew, tmp_path: Path
) -> None:
    job = (str(tmp_path), head_id(cluster))
    results = crew.map_unordered(lost_once, job, range(12), at_once=1)
    done = [next(results)]  # from the head: the other node is held by an item that does not end
    pid, item = wait_for(tmp_path / "begun").split()
    os.kill(int(pid), signal.SIGKILL)
    done += results
    assert sorted(number for number, _ in done) == list(range(12))
    assert int(item) in [number for number, _ in done[1:]]


class LosingTar(TarFormat):
    """Scans tar, but the first unit on a certain node is never done."""

    def __init__(self, folder: Path, other_nodes: str) -> None:
        self._job = (str(folder), other_nodes)

    def scan(self, unit: Any, store: Any, options: Any) -> Any:
        lost_once(self._job, 0)
        return super().scan(unit, store, options)


def test_a_node_that_dies_while_it_indexes_changes_nothing(
    cluster: Any, crew: RayCrew, tmp_path: Path
) -> None:
    one = make_shards(tmp_path / "one", 60)
    two = Path(shutil.copytree(one, tmp_path / "two"))
    third = cluster.add_node(**node())
    others = " ".join(n.node_id for n in cluster.list_all_nodes() if n is not third)
    found = replace(look_up(one), format=LosingTar(tmp_path, others))

    def lose_a_node(progress: BuildProgress) -> None:
        if progress.units_done == 1:
            wait_for(tmp_path / "begun")
            cluster.remove_node(third, allow_graceful=False)

    write_index(found, crew=crew, report=lose_a_node)
    write_index(look_up(two))
    assert third not in cluster.list_all_nodes()
    assert parts(one) == parts(two)


def die(job: None, item: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_item_that_kills_every_worker_is_given_up_and_named(
    crew: RayCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_crew, "_RETRIES_MAX", 1)
    with pytest.raises(WorkerError, match=r"gave up s3://b/x-7\.tar after 1 new starts"):
        list(crew.map_unordered(die, None, ["x-7.tar"], at_once=1, names=lambda i: f"s3://b/{i}"))


DRIVER = """
import os, signal, sys
from penstock.dataset.open import look_up, write_index
from penstock.dataset.ray_crew import RayCrew

def report(progress):
    if progress.units_done >= 30:
        os.kill(os.getpid(), signal.SIGKILL)

with RayCrew(sys.argv[2]) as crew:
    write_index(look_up(sys.argv[1]), crew=crew, report=report)
"""


def test_what_was_done_when_the_command_was_killed_is_not_done_again(
    cluster: Any, crew: RayCrew, tmp_path: Path
) -> None:
    folder = make_shards(tmp_path / "set", 60)
    command = [sys.executable, "-c", DRIVER, str(folder), cluster.address]
    ended = subprocess.run(command, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    done = [unit for unit in units_of(folder) if (folder / work_key(unit)).exists()]
    assert len(done) >= 30
    for unit in done:  # unreadable now, with the same marks: who scans it again will notice
        path = folder / unit.objects[0].key
        status = path.stat()
        path.write_bytes(bytes([255]) * status.st_size)
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    _, manifest = write_index(look_up(folder), crew=crew)
    assert manifest.num_samples == 600


def units_of(folder: Path) -> list[Any]:
    recipe = look_up(folder).recipe
    return recipe.format.units(recipe.objects, recipe.store, recipe.options)


def work_key(unit: Any) -> str:
    return f".penstock/work/all/{unit_name(unit)}.idx"


class Watched(Sequence[int]):
    """Numbers that know how many of them were taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: Any) -> Any:
        self.num_taken = max(self.num_taken, i.stop)
        return range(200)[i]


def double(job: int, item: int) -> int:
    return job * item


def test_a_bounded_number_of_tasks_is_in_flight(crew: RayCrew) -> None:
    items, ahead, results = Watched(), [], []
    for result in crew.map_unordered(double, 2, items, at_once=1):
        results.append(result)
        ahead.append(items.num_taken - len(results))
    assert sorted(results) == [2 * i for i in range(200)]
    assert max(ahead) < 2 * int(ray.cluster_resources()["CPU"])


# -- without a cluster ------------------------------------------------------------------------


def test_without_ray_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install .*\[ray\]'"), RayCrew():
        pass


def test_what_lives_in_this_process_is_refused(crew: RayCrew, tmp_path: Path) -> None:
    with penstock.Writer("memory://ray-refused/") as writer:
        writer.write({"txt": "a"})
    with pytest.raises(OptionError, match="memory of this process"):
        write_index(look_up("memory://ray-refused/"), rebuild=True, crew=crew)
    source = make_shards(tmp_path / "set", 1)
    with pytest.raises(OptionError, match="memory of this process"):
        pack(source, "memory://ray-refused-too/", crew=crew)
    with pytest.raises(OptionError, match="one stream"):
        pack(iter([{"txt": "a"}]), tmp_path / "out", crew=crew)
