"""What readers see while writers append, collide and die: the sentences of concepts/consistency.md.

Writers and readers are processes of their own. A writer appends ten samples a version, and is
killed with SIGKILL at random moments; version v holds the samples 0 … 10 v - 1 and nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.dataset.build_changes import compare, compare_with_store
from penstock.dataset.open import look_up, write_index
from penstock.dataset.pack import PackOptions, pack
from penstock.dataset.writer_destination import unfinished_jobs
from penstock.errors import ChangedError, DatasetError, PenstockError
from penstock.storage.locate import open_store
from penstock.storage.options import StoreOptions

PER_VERSION = 10
VERSIONS = 60
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["penstock", __name__])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, StoreOptions]:
    """A place to write to: a folder, and a bucket on a real server."""
    if request.param == "folder":
        return str(tmp_path / "set"), StoreOptions()
    s3 = request.getfixturevalue("s3")
    return f"{s3.uri}set/", s3.options


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `0`, `1`, … with ten samples each; the numbers go on from one to the next."""
    root = tmp_path_factory.mktemp("sources")
    for version in range(VERSIONS):
        folder = root / str(version)
        folder.mkdir()
        for number in range(version * PER_VERSION, (version + 1) * PER_VERSION):
            (folder / f"{number:06}.txt").write_text(text_of(number))
    return root


def text_of(number: int) -> str:
    return f"sample {number} " * (1 + number % 7)


def expected(version: int) -> list[str]:
    return [text_of(number) for number in range(version * PER_VERSION)]


def texts(dataset: penstock.Dataset) -> list[str]:
    return [sample["txt"] for sample in dataset]


def append_version(sources: Path, uri: str, options: StoreOptions, version: int) -> None:
    chosen = PackOptions(shard_size="4KB", append=version > 1, workers=2)
    pack(sources / str(version - 1), uri, chosen, store=options)


def newest_version(uri: str, options: StoreOptions) -> int:
    return len(list(open_store(uri, options).list(".penstock/all/v")))


def begin_appending(begun: Any, cache: str, *words: Any) -> None:
    os.environ["PENSTOCK_CACHE"] = cache
    begun.set()
    keep_appending(*words)


def keep_appending(sources: Path, uri: str, options: StoreOptions, last: int) -> None:
    """Append version after version; what an earlier one left undone is run again first."""
    while (version := newest_version(uri, options)) < last:
        if unfinished_jobs(open_store(uri, options)):
            for again in (version, version + 1):  # killed after the commit, or before it
                try:
                    append_version(sources, uri, options, again)
                    break
                except DatasetError:
                    if again > version:
                        raise
        else:
            append_version(sources, uri, options, version + 1)


READER = """
import json, select, sys, penstock
from tests.dataset.test_consistency import expected, texts

uri, mode, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
store = penstock.StoreOptions(**options)
pinned = penstock.open(uri, version=1, store=store)
latest, seen, rounds, last = pinned, set(), 0, 0
print("open", flush=True)
while not last or (mode == "latest" and latest.version < last):
    if select.select([sys.stdin], [], [], 0)[0] and not last:
        last = int(sys.stdin.readline())
    rounds += 1
    if mode == "pinned":
        assert texts(pinned) == expected(1), "a pinned version changed"
    else:
        latest = latest.latest() if rounds % 2 else penstock.open(uri, store=store)
        assert latest.version >= max(seen, default=1), "latest went back"
        seen.add(latest.version)
        assert texts(latest) == expected(latest.version), f"half of version {latest.version}"
print(json.dumps([rounds, len(seen)]))
"""


@pytest.fixture
def reader(place: tuple[str, StoreOptions], tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Give a function that starts a reader."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str) -> subprocess.Popen[str]:
        given = {k: v for k, v in asdict(place[1]).items() if v}
        process = subprocess.Popen(
            [sys.executable, "-c", READER, place[0], mode, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache of the readers")},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n", process.communicate()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def answer(process: subprocess.Popen[str], last: int) -> list[int]:
    """Let a reader end once it has seen the last version, and return what it counted."""
    out, errors = process.communicate(f"{last}\n")
    assert process.returncode == 0, errors
    found: list[int] = json.loads(out)
    return found


def test_a_writer_that_is_killed_again_and_again_disturbs_no_reader_and_loses_nothing(
    place: tuple[str, StoreOptions],
    sources: Path,
    reader: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    uri, options = place
    words = (sources, uri, options)
    append_version(*words, 1)
    pinned, latest = reader("pinned"), reader("latest")
    chance, num_killed, num_unfinished = random.Random(7), 0, 0
    while num_killed < 8 or num_unfinished < 3 or newest_version(uri, options) < 5:
        begun = PROCESSES.Event()
        told = (begun, os.environ["PENSTOCK_CACHE"], *words, VERSIONS)
        writer = PROCESSES.Process(target=begin_appending, args=told)
        writer.start()
        begun.wait()
        writer.join(chance.uniform(0.0, 0.4))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL, "it ended by itself"
        num_killed += 1
        num_unfinished += bool(unfinished_jobs(open_store(uri, options)))
    last = newest_version(uri, options) + 2
    keep_appending(*words, last)
    assert answer(pinned, last)[0] > 2
    assert answer(latest, last)[1] > 1, "the reader of latest has moved"
    for version in range(1, last + 1):
        assert texts(penstock.open(uri, version=version, store=options)) == expected(version)
    assert penstock.verify(uri, store=options).ok
    assert not unfinished_jobs(open_store(uri, options))


def files_of(uri: str, options: StoreOptions) -> dict[str, bytes]:
    store = open_store(uri, options)
    return {o.key: bytes(store.read(o.key)) for o in store.list(".penstock/all/")}


def test_no_byte_of_a_version_changes_when_others_are_added(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    uri, options = place
    before: dict[str, bytes] = {}
    for version in range(1, 19):  # beyond 16 parts, which are merged into one
        append_version(sources, uri, options, version)
        after = files_of(uri, options)
        assert before.items() < after.items()
        before = after
    write_index(look_up(uri, store=options), rebuild=True)
    assert before.items() < files_of(uri, options).items()
    assert texts(penstock.open(uri, version=3, store=options)) == expected(3)


# -- two writers at once ----------------------------------------------------------------------


def at_once(target: Callable[..., None], *several: tuple[Any, ...]) -> list[str]:
    """Run a function in processes that begin in one moment; return their errors, "" for none."""
    barrier = PROCESSES.Barrier(len(several))
    started, ends = [], []
    for number, words in enumerate(several):
        mine, theirs = PROCESSES.Pipe()
        cache = f"{os.environ['PENSTOCK_CACHE']}-{number}"
        process = PROCESSES.Process(target=_report, args=(theirs, barrier, cache, target, words))
        process.start()
        started.append(process)
        ends.append(mine)
    errors = [end.recv() for end in ends]
    for process in started:
        process.join()
    return errors


def _report(end: Any, barrier: Any, cache: str, target: Callable[..., None], words: Any) -> None:
    os.environ["PENSTOCK_CACHE"] = cache
    barrier.wait()
    try:
        target(*words)
        end.send("")
    except PenstockError as error:
        end.send(f"{type(error).__name__}: {error}")


def pack_one(source: Path, uri: str, options: StoreOptions) -> None:
    pack(source, uri, PackOptions(shard_size="4KB", append=True, workers=2), store=options)


def runs_of(dataset: penstock.Dataset) -> list[int]:
    """Return which sources a data set holds, in their order; each must be whole."""
    found = texts(dataset)
    firsts = [int(text.split()[1]) for text in found[::PER_VERSION]]
    whole = [text_of(first + i) for first in firsts for i in range(PER_VERSION)]
    assert found == whole, "samples of two writers are mixed"
    return [first // PER_VERSION for first in firsts]


def test_two_packs_at_once_make_two_versions_or_a_conflict_and_never_a_mix(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    uri, options = place
    append_version(sources, uri, options, 1)
    done = [0]
    for number in range(1, 9, 2):
        pair = (number, number + 1)
        errors = at_once(pack_one, *((sources / str(n), uri, options) for n in pair))
        assert all(not e or "run this again" in e or "unfinished" in e for e in errors), errors
        done += [n for n, error in zip(pair, errors, strict=True) if not error]
        dataset = penstock.open(uri, store=options)
        assert sorted(runs_of(dataset)) == sorted(done)
        assert dataset.version == len(done)
        for n, error in zip(pair, errors, strict=True):
            if error:
                pack_one(sources / str(n), uri, options)
                done.append(n)
    assert sorted(runs_of(penstock.open(uri, store=options))) == sorted(done)
    assert penstock.verify(uri, store=options).ok


def write_one(first: int, uri: str, options: StoreOptions) -> None:
    with penstock.Writer(uri, append=True, shard_size="4KB", store=options) as writer:
        for number in range(first, first + PER_VERSION):
            writer.write({"txt": text_of(number)})


def test_two_writers_at_once_make_two_versions_or_a_conflict_and_never_a_mix(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    root, options = place
    for attempt in range(3):
        uri = f"{root.rstrip('/')}/{attempt}/"
        append_version(sources, uri, options, 1)
        both = (10, 20)
        errors = at_once(write_one, *((first, uri, options) for first in both))
        assert all(e.startswith("DatasetError") or not e for e in errors), errors
        done = [first for first, error in zip(both, errors, strict=True) if not error]
        dataset = penstock.open(uri, store=options)
        assert sorted(runs_of(dataset)) == [0, *(first // PER_VERSION for first in done)]
        assert dataset.version == 1 + len(done)


def index_all(uri: str, options: StoreOptions) -> None:
    write_index(look_up(uri, store=options))


def test_two_that_index_at_once_name_every_object_once(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    uri, options = place
    store = open_store(uri, options)
    for version in range(1, 5):
        for number in range(PER_VERSION):
            store.write(f"{version}-{number}.txt", text_of(number).encode())
        assert at_once(index_all, (uri, options), (uri, options)) == ["", ""]
        dataset = penstock.open(uri, store=options)
        keys = [dataset.key(i) for i in range(len(dataset))]
        assert len(set(keys)) == len(keys) == version * PER_VERSION


# -- moments ----------------------------------------------------------------------------------


def test_a_version_that_was_committed_after_the_listing_is_not_taken_for_damage(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    uri, options = place
    append_version(sources, uri, options, 1)
    found = look_up(uri, store=options)
    append_version(sources, uri, options, 2)
    dataset = penstock.open(uri, store=options)
    assert compare(dataset.parts, found.objects).gone
    changes = compare_with_store(dataset.parts, found.objects, found.located.store)
    assert (changes.gone, changes.changed) == ((), ())
    assert write_index(found)[1].version == 2, "nothing is new, and nothing is gone"


def test_an_object_that_is_deleted_is_named_by_those_versions_that_need_it(
    place: tuple[str, StoreOptions], sources: Path
) -> None:
    uri, options = place
    append_version(sources, uri, options, 1)
    append_version(sources, uri, options, 2)
    first = penstock.open(uri, version=1, store=options)
    second = penstock.open(uri, store=options)
    store = open_store(uri, options)
    key = second.parts[1].tables[0].key(0)
    store.delete(key)
    assert texts(first) == expected(1), "who does not need it goes on"
    with pytest.raises(PenstockError, match=key):
        texts(second)
    with pytest.raises(ChangedError, match=rf"{key} \(gone\)"):
        penstock.open(uri, store=options)


def test_a_version_that_was_committed_without_its_end_is_whole(
    place: tuple[str, StoreOptions], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = place
    append_version(sources, uri, options, 1)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.dataset.writer_destination.Destination.forget", die)
        with pytest.raises(KeyboardInterrupt):
            append_version(sources, uri, options, 2)
    assert texts(penstock.open(uri, store=options)) == expected(2)
    append_version(sources, uri, options, 3)
    append_version(sources, uri, options, 2)  # It was done, and adds nothing again.
    assert texts(penstock.open(uri, store=options)) == expected(3)


def test_what_was_written_before_the_commit_is_seen_by_nobody(
    place: tuple[str, StoreOptions], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = place
    append_version(sources, uri, options, 1)
    reader = penstock.open(uri, store=options)
    penstock.open(sources / "1")
    with monkeypatch.context() as patch:
        patch.setattr("penstock.dataset.catalog.Catalog.commit", die)
        with pytest.raises(KeyboardInterrupt):
            append_version(sources, uri, options, 2)
    assert reader.origin is not None
    shards = list(open_store(uri, options).list("shard-"))
    assert len(shards) > reader.origin.manifest.num_objects
    assert reader.latest() is reader
    assert texts(penstock.open(uri, store=options)) == expected(1)
    append_version(sources, uri, options, 2)
    assert texts(reader.latest()) == expected(2)


def die(*words: Any) -> None:
    raise KeyboardInterrupt
