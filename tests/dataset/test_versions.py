"""Versions: moving from one to another, parts merged at any size, one download for a node."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.clock import VirtualClock
from testkit.parts import merge_parts
from testkit.shaper import Shape, Shaper

import penstock
from penstock.dataset import build_merge, pack_plan
from penstock.dataset.build_merge import MergeOutline, merged, outline_of
from penstock.dataset.catalog import Catalog, Manifest, PartRef, cache_folder
from penstock.dataset.catalog_copies import STUCK_S, CachedPart, local_copy
from penstock.dataset.fields import Field
from penstock.dataset.part import Part, Rows, make_part, with_checksums
from penstock.errors import CorruptError, OptionError
from penstock.storage.base import ObjectInfo
from penstock.storage.folder import FolderStore
from penstock.storage.locate import open_store
from penstock.storage.retry import RetryingStore


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def append(uri: str | Path, first: int, count: int, **more: Any) -> int:
    with penstock.Writer(uri, append=first > 0, shard_size="4KB", **more) as writer:
        for number in range(first, first + count):
            writer.write({"txt": f"sample {number}"})
    return writer.version


# -- latest and pinned ------------------------------------------------------------------------


def test_latest_is_itself_until_there_is_a_newer_version(tmp_path: Path) -> None:
    append(tmp_path / "set", 0, 10)
    first = penstock.open(tmp_path / "set", decoders={"txt": len})
    assert first.latest() is first
    append(tmp_path / "set", 10, 5)
    append(tmp_path / "set", 15, 5)
    newest = first.latest()
    assert (first.version, newest.version) == (1, 3)
    assert (len(first), len(newest)) == (10, 20)
    assert newest[19]["txt"] == len("sample 19"), "with the same decoders"
    assert newest.at_version(1).fingerprint == first.fingerprint
    assert newest.fingerprint == penstock.open(tmp_path / "set").fingerprint
    assert newest.origin is not None
    assert newest.origin.manifest.fingerprint == newest.fingerprint, "known before it is opened"


def test_to_find_nothing_new_costs_one_request(s3: Any) -> None:
    append(s3.uri, 0, 10, store=s3.options)
    dataset = penstock.open(s3.uri, store=s3.options)
    assert dataset.origin is not None
    store = dataset.origin.catalog.store
    assert isinstance(store, RetryingStore)
    before = store.num_attempts
    assert dataset.latest() is dataset
    assert store.num_attempts - before == 1


def test_a_version_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    append(tmp_path / "set", 0, 10)
    with pytest.raises(OptionError, match="no version 2; it has: 1"):
        penstock.open(tmp_path / "set").at_version(2)


def test_a_version_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    append(tmp_path / "set", 0, 10)
    dataset = penstock.open(tmp_path / "set")
    assert dataset.origin is not None

    class Late(VirtualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now_s() >= 2.0 and dataset.latest() is dataset:
                append(tmp_path / "set", 10, 5)

    catalog = dataset.origin.catalog
    assert catalog.read_soon(2, 10.0, Late()).num_samples == 15
    with pytest.raises(OptionError, match="no version 3"):
        catalog.read_soon(3, 10.0, VirtualClock())


def test_what_has_no_other_version_says_so(tmp_path: Path) -> None:
    append(tmp_path / "set", 0, 10)
    dataset = penstock.open(tmp_path / "set")
    with pytest.raises(OptionError, match="view of 3 samples"):
        dataset[:3].latest()
    (part,) = (tmp_path / "set/.penstock/all/parts").glob("*.idx")
    with pytest.raises(OptionError, match="without versions"):
        penstock.open(part).latest()


def test_a_data_set_travels_to_a_machine_with_another_cache(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(s3.uri, 0, 10, store=s3.options)
    data = pickle.dumps(penstock.open(s3.uri, store=s3.options)[2:4])
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "another machine"))
    assert [s["txt"] for s in pickle.loads(data)] == ["sample 2", "sample 3"]


# -- what is read to open ---------------------------------------------------------------------


def test_a_large_set_is_opened_without_listing_its_objects(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(s3.uri, 0, 400, store=s3.options)
    penstock.open(s3.uri, store=s3.options)
    with Shaper(s3.access.endpoint) as shaper:
        options = penstock.StoreOptions(
            endpoint=shaper.endpoint,
            access_key=s3.access.access_key,
            secret_key=s3.access.secret_key,
        )
        begin = shaper.counts()
        assert len(penstock.open(s3.uri, store=options, check=False)) == 400
        unlisted = shaper.counts()
        monkeypatch.setattr("penstock.dataset.open._CHECKED_OBJECTS_MAX", 10)
        assert len(penstock.open(s3.uri, store=options)) == 400
        too_many = shaper.counts()
    assert (unlisted - begin).requests == 2, "which versions are there, and the latest"
    assert (too_many - unlisted).requests == 2


READ = """
import json, os, sys, penstock
print("ready", flush=True)
sys.stdin.readline()
uri, endpoint, access_key, secret_key = sys.argv[1:]
options = penstock.StoreOptions(endpoint=endpoint, access_key=access_key, secret_key=secret_key)
dataset = penstock.open(uri, store=options, check=False)
maps = open("/proc/self/maps").read()
(name,) = {os.path.basename(line.split()[-1]) for line in maps.splitlines() if ".idx" in line}
print(json.dumps([len(dataset), name]))
"""


def plain_part(count: int) -> Part:
    rows = Rows(
        objects=[ObjectInfo(key="x.tar", size_bytes=count * 512)],
        counts=[count],
        addressing="extents",
        columns={"offset": np.arange(count) * 512, "length": np.full(count, 512)},
    )
    keys = [f"{i:06}" for i in range(count)]
    field = Field(name="txt", encoding="txt")
    return make_part(format="tar", fields=[field], tables=[rows], keys=keys)


def manifest_of(ref: PartRef) -> Manifest:
    return Manifest(
        version=1,
        format="tar",
        options={},
        num_samples=ref.num_samples,
        num_objects=1,
        size_bytes=0,
        parts=[ref],
    )


def test_ranks_that_start_at_once_download_an_index_once(s3: Any) -> None:
    part = plain_part(300_000)
    catalog = Catalog(open_store(s3.uri, s3.options), ".penstock/all/")
    ref = catalog.add_part(part)
    catalog.commit(manifest_of(ref))
    index_bytes = ref.size_bytes
    assert index_bytes > 4 << 20, "smaller ones are not mapped"
    for copy in cache_folder().rglob("*.idx"):
        copy.unlink()
    with Shaper(s3.access.endpoint, Shape(bandwidth_bytes_s=20e6)) as shaper:
        words = [s3.uri, shaper.endpoint, s3.access.access_key, s3.access.secret_key]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", READ, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        answers = [rank.communicate()[0] for rank in ranks]
        counts = shaper.counts()
    assert [json.loads(answer) for answer in answers] == [[part.num_samples, f"{ref.name}.idx"]] * 4
    assert index_bytes <= counts.body_bytes < index_bytes + 4 * 10_000


@pytest.fixture
def remote(tmp_path: Path) -> CachedPart:
    """A part in a store, of which there is no copy yet."""
    store = FolderStore(tmp_path / "store")
    ref = Catalog(store, "").add_part(plain_part(100))
    return CachedPart(
        store=store,
        key=f"parts/{ref.name}.idx",
        name=ref.name,
        size_bytes=ref.size_bytes,
        folder=tmp_path / "copies",
    )


HOLD = """
import fcntl, os, signal, sys
folder, name = sys.argv[1:]
os.makedirs(folder)
lock = open(f"{folder}/{name}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
open(f"{folder}/.penstock-tmp-0-{name}.idx", "w").write("half of it")
print("held", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_download_that_was_killed_or_is_stuck_is_done_by_another(
    remote: CachedPart, is_killed: bool
) -> None:
    command = [sys.executable, "-c", HOLD, str(remote.folder), remote.name]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    clock = VirtualClock()
    if is_killed:
        holder.kill()
        holder.wait()
    assert local_copy(remote, clock).read_bytes() == remote.store.read(remote.key)
    assert (clock.now_s() > STUCK_S) == (not is_killed)
    left = [p.name for p in remote.folder.iterdir() if p.name.startswith(".")]
    assert len(left) == (not is_killed), "what a dead one left is cleared, a living one's is not"
    holder.kill()
    holder.wait()


def test_a_copy_that_is_not_what_its_name_says_is_refused(remote: CachedPart) -> None:
    data = bytearray(remote.store.read(remote.key))
    data[-1] ^= 1
    remote.store.write(remote.key, data)
    with pytest.raises(CorruptError, match="damaged in its store"):
        local_copy(remote)
    assert not remote.is_here
    assert not list(remote.folder.glob(".*"))


# -- merging ----------------------------------------------------------------------------------


def extents_part(first: int, count: int, names: Sequence[str], *, rich: bool) -> Part:
    infos = [ObjectInfo(key=f"x-{first + i}.tar", size_bytes=9, etag="e" * i) for i in range(2)]
    rows = Rows(
        objects=infos,
        counts=[count, 0],
        addressing="extents",
        columns={
            "offset": np.arange(count) + first,
            "length": np.full(count, 2**33 if rich else 5),
        },
        blobs=[b"one", b""],
    )
    members = np.arange(count * len(names), dtype=np.uint32).reshape(count, len(names))
    part = make_part(
        format="tar",
        fields=[Field(name=n, encoding=n) for n in names],
        tables=[rows],
        keys=[f"{first}/{i}" for i in range(count)],
        members=(members, members + 1),
    )
    return with_checksums(part, np.arange(count, dtype=np.uint64)) if rich else part


def blocks_part(first: int, counts: Sequence[int]) -> Part:
    rows = Rows(
        objects=[ObjectInfo(key=f"b-{first}", size_bytes=99), ObjectInfo(key="c", size_bytes=1)],
        counts=[sum(counts), 0],
        addressing="blocks",
        columns={
            "block.object": np.zeros(len(counts), np.int64),
            "block.offset": np.arange(len(counts)),
            "block.length": np.full(len(counts), 7),
            "block.count": np.array(counts, np.int64),
        },
    )
    return make_part(
        format="parquet", fields=[Field(name="a", encoding="value", dtype="<i8")], tables=[rows]
    )


def even_part(count: int, width: int) -> Part:
    tables = [
        Rows(
            objects=[ObjectInfo(key=f"{name}-{count}.npy", size_bytes=count * width)],
            counts=[count],
            addressing="even",
            columns={n: np.array([width]) for n in ("base", "stride", "width")},
        )
        for name in "xy"
    ]
    field = Field(name="x", encoding="value", dtype="<f4", shape=(width,))
    return make_part(format="npy", fields=[field], tables=tables)


some_parts = st.one_of(
    st.lists(
        st.builds(
            extents_part,
            st.integers(0, 99),
            st.integers(0, 5),
            st.lists(st.sampled_from(["txt", "jpg", "cls"]), min_size=1, max_size=3, unique=True),
            rich=st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(
        st.builds(blocks_part, st.integers(0, 99), st.lists(st.integers(1, 9), max_size=3)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.builds(even_part, st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=5),
)


@given(parts=some_parts, seed=st.integers(0, 99), is_mapped=st.booleans())
def test_merging_piece_by_piece_gives_the_bytes_of_merging_at_once(
    parts: list[Part], seed: int, is_mapped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "merged"
    folder.mkdir(exist_ok=True)
    outlines = [outline_of(part, number) for number, part in enumerate(parts)]
    random.Random(seed).shuffle(outlines)
    outline = reduce(MergeOutline.joined, outlines)
    merge_parts(parts).save(folder / "at once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_merge, "_HELD_BYTES_MAX", 0 if is_mapped else 1 << 20)
        pieces = [lambda part=part: part for part in parts]
        with merged(outline, pieces, folder) as part:
            part.save(folder / "piece by piece")
    assert (folder / "piece by piece").read_bytes() == (folder / "at once").read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["at once", "piece by piece"]


# -- planning ---------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=60),
    at_once=st.integers(1, 70),
    seed=st.none() | st.integers(0, 9),
    limit=st.none() | st.integers(1, 70),
)
def test_a_pack_is_planned_the_same_some_samples_at_a_time(
    sizes: list[int], at_once: int, seed: int | None, limit: int | None
) -> None:
    def plan(at_once: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pack_plan, "_AT_ONCE", at_once)
            sizes_of = np.array(sizes).__getitem__
            words = {"num_fields": 1, "shard_size": 12_000, "seed": seed, "limit": limit}
            return pack_plan.make_plan(sizes_of, len(sizes), **words).starts.tolist()

    assert plan(at_once) == plan(1000)
