"""Writers whose store refuses something: what they say is true, and nothing is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.dataset.pack import PackOptions, pack
from penstock.dataset.writer import Writer
from penstock.dataset.writer_destination import JOBS, unfinished_jobs
from penstock.errors import (
    DatasetError,
    DeniedError,
    FormatError,
    NotFoundError,
    OptionError,
    UnreachableError,
)
from penstock.storage import FolderStore, MemoryStore, ObjectInfo, Store, StoreOptions
from penstock.storage.locate import open_store
from penstock.testing.servers import S3Access

SAMPLES = [{"bin": bytes([i]) * 900, "cls": i} for i in range(12)]
Place = tuple[str, StoreOptions]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def limited(server: S3Access, *refused: str) -> Place:
    """Return a bucket as a user sees it to whom some things are refused."""
    name = f"test-{uuid.uuid4().hex}"
    uri = server.create_bucket(name)
    return uri, server.limited(name, *refused).options


@pytest.fixture
def no_delete(s3_server: S3Access) -> Place:
    return limited(s3_server, "s3:DeleteObject")


def notes(place: Place) -> list[str]:
    return [info.key for info in open_store(*place).list(JOBS)]


def write(place: Place, samples: list[dict[str, Any]] = SAMPLES, **more: Any) -> Writer:
    with Writer(place[0], store=place[1], shard_size="4KB", **more) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def values(place: Place) -> list[int]:
    return [sample["cls"] for sample in penstock.open(place[0], store=place[1])]


def test_a_writer_that_may_not_delete_has_committed_and_says_so(
    no_delete: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert write(no_delete).version == 1
    assert len(notes(no_delete)) == 1, "the store has refused the removal"
    said = " ".join(caplog.messages)
    assert "version 1 is committed and whole" in said
    assert "Access Denied" in said
    assert "No version" not in said
    assert values(no_delete) == list(range(12))


def test_a_note_that_nobody_may_remove_is_in_nobodys_way(no_delete: Place) -> None:
    write(no_delete)
    assert write(no_delete, append=True).version == 2
    assert pack(SAMPLES, no_delete[0], PackOptions(append=True), store=no_delete[1]).version == 3
    assert len(notes(no_delete)) == 3
    assert unfinished_jobs(open_store(*no_delete)) == []
    assert values(no_delete) == 3 * list(range(12))
    with pytest.raises(DatasetError, match="already has version 3"):
        write(no_delete)


def test_packing_without_delete_works_again_and_again(no_delete: Place, tmp_path: Path) -> None:
    write((str(tmp_path), StoreOptions()))
    options = PackOptions(shard_size="4KB", append=True)
    for version in (1, 2):
        report = pack(tmp_path, no_delete[0], options, store=no_delete[1])
        assert (report.version, report.num_shards_reused) == (version, 0)
    assert values(no_delete) == 2 * list(range(12))


def test_without_delete_an_early_failure_is_the_error_that_is_raised(no_delete: Place) -> None:
    with pytest.raises(DatasetError, match="nothing was written"):
        write(no_delete, [])
    with pytest.raises(OptionError, match="whole number"):
        write(no_delete, [{"cls": "one"}])
    assert write(no_delete).version == 1, "what failed is in nobody's way"


def test_without_list_nothing_is_begun(s3_server: S3Access) -> None:
    place = limited(s3_server, "s3:ListBucket")
    with pytest.raises(DeniedError):
        write(place)
    with pytest.raises(NotFoundError):
        open_store(*place).info("shard-000000.tar")


def test_a_note_left_by_a_kill_after_the_commit_is_in_nobodys_way(tmp_path: Path) -> None:
    place = (str(tmp_path / "d"), StoreOptions())
    store = FolderStore(tmp_path / "d")
    with Writer(place[0]) as writer:
        writer.write({"cls": 0})
        (note,) = notes(place)
        noted = bytes(store.read(note))
    store.write(note, noted)
    assert unfinished_jobs(store) == []
    penstock.open(place[0])
    write(place, append=True)
    assert values(place) == [0, *range(12)]


class Interrupting(MemoryStore):
    """Raises in place of one call, as Ctrl-C or a broken network does at that moment."""

    failing: BaseException
    where = ""

    def delete(self, key: str) -> None:
        if self.where == "delete":
            raise self.failing
        super().delete(key)

    def write(self, key: str, data: Any, *, only_if_absent: bool = False) -> ObjectInfo:
        info = super().write(key, data, only_if_absent=only_if_absent)
        if self.where == "commit" and "/all/v" in key:
            raise self.failing  # after it has arrived: only the answer is lost
        return info


@pytest.mark.parametrize("where", ["delete", "commit"])
@pytest.mark.parametrize("failing", [KeyboardInterrupt(), UnreachableError("no answer")])
def test_an_interrupt_around_the_commit_never_denies_the_commit(
    where: str, failing: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Interrupting(uuid.uuid4().hex)
    store.failing, store.where = failing, where
    monkeypatch.setattr("penstock.dataset.writer_destination.open_store", lambda *_: store)
    raised: BaseException | None = None
    try:
        write((store.uri, StoreOptions()))
    except (KeyboardInterrupt, UnreachableError) as error:
        raised = error
    said = " ".join(getattr(raised, "__notes__", []))
    assert "No version" not in said
    assert raised is None or where == "delete" or "was committed before that" in said
    assert values((store.uri, StoreOptions())) == list(range(12))
    store.clear()


@pytest.mark.parametrize("base", [0, 1])
def test_the_shards_of_a_writer_that_failed_can_be_kept(tmp_path: Path, base: int) -> None:
    place = (str(tmp_path), StoreOptions())
    if base:
        write(place, [{"bin": b"0", "cls": 100}])
    with pytest.raises(OptionError) as caught:
        write(place, [*SAMPLES, {"bin": b"", "cls": "none"}], append=bool(base))
    (said,) = caught.value.__notes__
    (note,) = notes(place)
    assert f"delete only {note} and run `penstock index" in said
    (tmp_path / note).unlink()
    assert main(["index", str(tmp_path)]) == 0
    kept = values(place)
    assert kept == [100] * base + list(range(len(kept) - base))
    assert len(kept) - base >= 9


def test_no_message_of_a_writer_advises_to_delete_shards(tmp_path: Path) -> None:
    place = (str(tmp_path), StoreOptions())
    messages = []
    with pytest.raises(OptionError) as failed:
        write(place, [*SAMPLES, {"cls": "none"}])
    messages += failed.value.__notes__
    for attempt in (lambda: write(place), lambda: penstock.open(tmp_path)):
        with pytest.raises(DatasetError) as refused:
            attempt()
        messages.append(str(refused.value))
    for message in messages:
        assert "delete only .penstock/pack/" in message
        assert message.count("delete") == 1


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    FolderStore(tmp_path).write(f"{JOBS}writer-1.json", b"\xff{")
    with pytest.raises(FormatError, match=r"pack/writer-1\.json is no note of a job"):
        write((str(tmp_path), StoreOptions()))


KILLED = """
import os, signal, sys
from penstock.dataset import writer_destination
from penstock.dataset.pack import PackOptions, pack

writer_destination.Destination.forget = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
pack(sys.argv[1], sys.argv[2], PackOptions(shard_size="4KB", append=True))
"""


def test_a_pack_killed_after_its_commit_is_whole_for_all(tmp_path: Path) -> None:
    source, place = tmp_path / "src", (str(tmp_path / "d"), StoreOptions())
    write((str(source), StoreOptions()))
    command = [sys.executable, "-c", KILLED, str(source), place[0]]
    killed = subprocess.run(command, check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert len(notes(place)) > 1
    assert unfinished_jobs(open_store(*place)) == []
    assert write(place, append=True).version == 2
    again = pack(source, place[0], PackOptions(shard_size="4KB", append=True))
    assert (again.version, again.num_samples) == (1, 12), "it reports what it had committed"
    assert notes(place) == []
    assert values(place) == 2 * list(range(12))


def test_a_pack_does_not_go_on_over_a_version_of_somebody_else(tmp_path: Path) -> None:
    source, place = tmp_path / "src", (str(tmp_path / "d"), StoreOptions())
    write((str(source), StoreOptions()))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, place[0], PackOptions(shard_size="4KB"), report=stop)
    store: Store = FolderStore(tmp_path / "d")
    (note,) = [key for key in notes(place) if key.endswith(".json")]
    noted = bytes(store.read(note))
    store.delete(note)
    write((str(tmp_path / "other"), StoreOptions()), [{"cls": 7}])
    for info in FolderStore(tmp_path / "other").list():
        if info.key.startswith(".penstock/all/"):
            store.write(info.key, FolderStore(tmp_path / "other").read(info.key))
    store.write("shard-000000.tar", FolderStore(tmp_path / "other").read("shard-000000.tar"))
    store.write(note, noted.replace(b'"first_shard":0', b'"first_shard":1'))
    before = {info.key: bytes(store.read(info.key)) for info in store.list()}
    with pytest.raises(DatasetError, match=r"has version 1, pack-.* began with version 0"):
        pack(source, place[0], PackOptions(shard_size="4KB"))
    assert {info.key: bytes(store.read(info.key)) for info in store.list()} == before
