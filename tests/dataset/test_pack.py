from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg

import penstock
from penstock.dataset.pack import PackOptions, PackProgress, pack
from penstock.dataset.verify import verify
from penstock.errors import DatasetError, DecodeError, FormatError, OptionError
from penstock.order import GlobalOrder
from penstock.storage import FolderStore, MemoryStore, Store


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore(uuid.uuid4().hex)
    yield store
    store.clear()


def jpeg(number: int) -> bytes:
    pixels = np.full((8, 8, 3), number, np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, colorspace="RGB"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(60):
        folder = tmp_path / "images" / ("cat", "dog", "eel")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.JPEG").write_bytes(jpeg(number))
    return tmp_path / "images"


def objects(store: Store) -> dict[str, bytes]:
    return {o.key: bytes(store.read(o.key)) for o in store.list() if not o.key.startswith(".")}


def leftovers(store: Store) -> list[str]:
    return [o.key for o in store.list(".penstock/pack/")]


RAW = {"jpg": None, "jpeg": None, "png": None, "image": None}
SMALL = PackOptions(shard_size="16KB")


def test_a_folder_of_images_keeps_bytes_and_classes(images: Path, tmp_path: Path) -> None:
    report = pack(images, tmp_path / "out", SMALL)
    source, packed = penstock.open(images, decoders=RAW), penstock.open(report.uri, decoders=RAW)
    assert list(packed.fields) == ["jpeg", "cls"]
    assert [s["jpeg"] for s in packed] == [s["image"] for s in source]
    assert [s["cls"] for s in packed] == [s["class"] for s in source]
    assert (report.version, report.num_samples, report.num_shards_reused) == (1, 60, 0)
    assert report.num_shards == len(objects(FolderStore(tmp_path / "out"))) > 3
    assert report.size_bytes == sum(map(len, objects(FolderStore(tmp_path / "out")).values()))
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        assert archive.getnames()[:3] == ["000000000.jpeg", "000000000.cls", "000000001.jpeg"]
    assert leftovers(FolderStore(tmp_path / "out")) == []
    assert verify(tmp_path / "out").ok


def test_a_copy_without_index_is_the_same_data_set(images: Path, tmp_path: Path) -> None:
    packed = penstock.open(pack(images, tmp_path / "out", SMALL).uri)
    for key, data in objects(FolderStore(tmp_path / "out")).items():
        FolderStore(tmp_path / "copy").write(key, data)
    assert penstock.open(tmp_path / "copy").fingerprint == packed.fingerprint


def test_shards_do_not_depend_on_the_number_of_workers(images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "one", PackOptions(shard_size="16KB", workers=1))
    pack(images, tmp_path / "many", PackOptions(shard_size="16KB", workers=7))
    one = objects(FolderStore(tmp_path / "one"))
    assert one == objects(FolderStore(tmp_path / "many"))


def test_shuffled_is_the_order_of_the_seed(images: Path, memory: MemoryStore) -> None:
    report = pack(images, memory.uri, PackOptions(shard_size="16KB", shuffle=7, limit=25))
    source, packed = penstock.open(images, decoders=RAW), penstock.open(memory.uri, decoders=RAW)
    ids = GlobalOrder(num_samples=60, seed=7).ids(0, 0, 25).tolist()
    assert report.num_samples == 25
    assert [s["jpeg"] for s in packed] == [source[i]["image"] for i in ids]
    assert packed.key(24) == "000000024"


def test_names_may_be_kept(images: Path, memory: MemoryStore) -> None:
    (images / "cat" / "a.b.JPEG").write_bytes(jpeg(1))
    pack(images, memory.uri, PackOptions(keep_keys=True))
    packed = penstock.open(memory.uri)
    assert [packed.key(0), packed.key(20)] == ["cat/000", "cat/a_b"]


KILLED = """
import os, signal, sys
from penstock.dataset.pack import PackOptions, pack

def report(progress):
    if progress.shards_done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

pack(sys.argv[1], sys.argv[2], PackOptions(shard_size="8KB", shuffle=3, workers=3), report=report)
"""


@pytest.mark.parametrize("shards_done", [1, 4, 8])
def test_a_killed_pack_goes_on_and_ends_the_same(
    images: Path, tmp_path: Path, shards_done: int
) -> None:
    options = PackOptions(shard_size="8KB", shuffle=3)
    whole = pack(images, tmp_path / "whole", options)
    place = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(images), str(place), str(shards_done)]
    killed = subprocess.run(command, check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert not list(FolderStore(place).list(".penstock/all/"))
    kept = {p.name: p.stat().st_mtime_ns for p in place.glob("*.tar")}
    noted = [name for name in leftovers(FolderStore(place)) if name.endswith(".idx")]

    progress: list[PackProgress] = []
    again = pack(images, place, options, report=progress.append)
    assert again.num_shards_reused == len(noted) >= shards_done
    assert again.num_shards == whole.num_shards == progress[-1].shards_done > shards_done
    assert objects(FolderStore(place)) == objects(FolderStore(tmp_path / "whole"))
    untouched = [n for n, mtime in kept.items() if (place / n).stat().st_mtime_ns == mtime]
    assert len(untouched) == len(noted)
    found, wanted = penstock.open(place), penstock.open(tmp_path / "whole")
    assert found.fingerprint == wanted.fingerprint
    assert leftovers(FolderStore(place)) == []
    assert verify(place).ok


def stopped(images: Path, place: Path, options: PackOptions) -> None:
    """Leave a pack after its first shard, as a full disk or an interrupt does."""

    def report(progress: PackProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(images, place, options, report=report)


def test_a_shard_that_changed_since_is_written_again(images: Path, tmp_path: Path) -> None:
    whole = objects(FolderStore(pack(images, tmp_path / "whole", SMALL).uri))
    stopped(images, tmp_path / "out", SMALL)
    for path in (tmp_path / "out").glob("*.tar"):
        path.write_bytes(b"?" * path.stat().st_size)
    assert pack(images, tmp_path / "out", SMALL).num_shards_reused == 0
    assert objects(FolderStore(tmp_path / "out")) == whole


def test_another_pack_does_not_mix_with_one_that_is_unfinished(
    images: Path, tmp_path: Path
) -> None:
    stopped(images, tmp_path / "out", SMALL)
    with pytest.raises(DatasetError, match="unfinished"):
        pack(images, tmp_path / "out", PackOptions(shard_size="16KB", shuffle=1))
    (images / "cat" / "new.JPEG").write_bytes(jpeg(1))
    with pytest.raises(DatasetError, match="unfinished"):
        pack(penstock.open(images, check=False, extensions=["jpeg"]), tmp_path / "out", SMALL)


def test_half_a_pack_is_not_taken_for_a_data_set(images: Path, tmp_path: Path) -> None:
    stopped(images, tmp_path / "out", SMALL)
    with pytest.raises(DatasetError, match="is being written"):
        penstock.open(tmp_path / "out")
    pack(images, tmp_path / "out", SMALL)
    assert len(penstock.open(tmp_path / "out")) == 60


def test_killed_after_the_commit_is_finished(images: Path, tmp_path: Path) -> None:
    stopped(images, tmp_path / "out", SMALL)
    store = FolderStore(tmp_path / "out")
    noted = {key: bytes(store.read(key)) for key in leftovers(store)}
    pack(images, tmp_path / "out", SMALL)
    for key, data in noted.items():
        store.write(key, data)
    report = pack(images, tmp_path / "out", SMALL)
    assert (report.version, report.num_samples) == (1, 60)
    assert leftovers(store) == []


def test_what_is_there_is_not_written_over(images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "out", SMALL)
    with pytest.raises(DatasetError, match="already has version 1 with 60 samples"):
        pack(images, tmp_path / "out", SMALL)
    report = pack(images, tmp_path / "out", PackOptions(append=True, limit=5))
    assert (report.version, report.num_samples) == (2, 65)
    packed = penstock.open(tmp_path / "out", decoders=RAW)
    assert (packed[60], packed.key(60)) == (packed[0], "000000060")


def test_a_bad_sample_at_once_leaves_the_destination_free(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        FolderStore(tmp_path / "src").write(name, b"\xff\xfe")
    with pytest.raises(DecodeError):
        pack(tmp_path / "src", tmp_path / "out", PackOptions(format="npy"))
    assert objects(FolderStore(tmp_path / "out")) == {}
    assert leftovers(FolderStore(tmp_path / "out")) == []


@pytest.fixture
def table(images: Path) -> Path:
    rows = ["file,label,caption,score,note"]
    for number in range(9):
        name = f"{('cat', 'dog', 'eel')[number % 3]}/{number:03}.JPEG"
        rows.append(f'{name},{number},"a, b {number}",{number / 2},{"x" if number % 2 else ""}')
    (images / "labels.csv").write_text("\n".join(rows) + "\n")
    return images / "labels.csv"


def test_a_table_beside_its_files(table: Path, memory: MemoryStore) -> None:
    pack(table, memory.uri, SMALL)
    packed = penstock.open(memory.uri, decoders=RAW)
    assert set(packed.fields) == {"jpeg", "cls", "caption.txt", "score.json", "note.txt"}
    wanted = {"jpeg": jpeg(5), "cls": 5, "caption.txt": "a, b 5", "score.json": 2.5}
    assert packed[5] == {**wanted, "note.txt": "x"}
    assert packed[4]["note.txt"] is None


def test_a_table_becomes_arrays_too(table: Path, memory: MemoryStore) -> None:
    text = "\n".join(",".join(line.split(",")[:2]) for line in table.read_text().splitlines())
    table.write_text(text)
    pack(table, memory.uri, PackOptions(format="npy"))
    packed = penstock.open(memory.uri)
    assert {f.name: (f.dtype, f.shape) for f in packed.fields.values()} == {
        "jpeg": ("|u1", (8, 8, 3)),
        "cls": ("<i8", ()),
    }
    assert abs(int(packed[7]["jpeg"][0, 0, 0]) - 7) <= 1


def test_the_column_of_files_may_have_any_name(table: Path, memory: MemoryStore) -> None:
    table.write_text(table.read_text().replace("file,", "Picture,", 1))
    with pytest.raises(OptionError, match=r"has no column file or path .* it has Picture, label"):
        pack(table, memory.uri)
    report = pack(table, memory.uri, PackOptions(file_column="picture"))
    assert report.num_samples == 9


def test_a_file_that_is_not_there_is_named(table: Path, memory: MemoryStore) -> None:
    (table.parent / "dog" / "004.JPEG").unlink()
    with pytest.raises(FormatError, match=r"1 of 9 files .* 'dog/004.JPEG' in row 6"):
        pack(table, memory.uri)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("file,a\nx.jpg,1,2", "row 2 has 3 cells, not 2"),
        ("file", "has 1 rows"),
        ("file,A,a\nx,1,2", "two columns of one name"),
        ("file\n../x.jpg", "row 2 of .* is not a key"),
    ],
)
def test_a_broken_table_is_explained(
    tmp_path: Path, memory: MemoryStore, lines: str, said: str
) -> None:
    (tmp_path / "t.csv").write_text(lines)
    with pytest.raises((FormatError, OptionError), match=said):
        pack(tmp_path / "t.csv", memory.uri)


def test_parquet_becomes_tar_with_images_as_they_are(tmp_path: Path, memory: MemoryStore) -> None:
    features = '{"info": {"features": {"image": {"_type": "Image"}}}}'
    images = [{"bytes": jpeg(i), "path": None} for i in range(40)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "image": pa.array(images, kind),
        "label": pa.array(range(40), pa.int64()),
        "Caption": [f"number {i}" if i else None for i in range(40)],
        "score": pa.array([i / 2 for i in range(40)], pa.float32()),
        "boxes": pa.array([[i, i + 1] for i in range(40)]),
    }
    rows = pa.table(columns).replace_schema_metadata({"huggingface": features})
    (tmp_path / "p").mkdir()
    pq.write_table(rows, tmp_path / "p" / "train.parquet", row_group_size=7)
    pack(tmp_path / "p", memory.uri, PackOptions(shard_size="16KB"))
    packed = penstock.open(memory.uri, decoders=RAW)
    names = {"jpg", "cls", "caption.txt", "score.npy", "boxes.npy"}
    assert set(packed.fields) == names
    assert [s["jpg"] for s in packed] == [jpeg(i) for i in range(40)]
    assert [s["cls"] for s in packed] == list(range(40))
    assert (packed[0]["caption.txt"], packed[3]["caption.txt"]) == (None, "number 3")
    assert packed[5]["score.npy"] == np.float32(2.5)
    assert packed[5]["boxes.npy"].tolist() == [5, 6]


def test_tar_is_packed_anew_without_a_change_to_its_samples(
    images: Path, memory: MemoryStore, tmp_path: Path
) -> None:
    pack(images, memory.uri, SMALL)
    pack(memory.uri, tmp_path / "again", PackOptions(shard_size="64KB"))
    first, again = penstock.open(memory.uri), penstock.open(tmp_path / "again")
    assert again.parts[0].tables[0].num_objects < first.parts[0].tables[0].num_objects
    decoders = {"jpeg": None, "cls": None}
    assert list(again.with_decoders(decoders)) == list(first.with_decoders(decoders))
    pack(first[10:20], tmp_path / "view", SMALL)
    view = penstock.open(tmp_path / "view").with_decoders(decoders)
    assert list(view) == list(first[10:20].with_decoders(decoders))


def test_arrays_become_shards_of_arrays(tmp_path: Path, memory: MemoryStore) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "d.x.npy", np.arange(600, dtype=np.float32).reshape(100, 3, 2))
    np.save(tmp_path / "a" / "d.y.npy", np.arange(100, dtype=np.int16))
    report = pack(tmp_path / "a", memory.uri, PackOptions(format="npy", shard_size=26 * 30 + 128))
    packed = penstock.open(memory.uri)
    assert report.num_shards == 4
    assert packed[99]["x"].tolist() == [[594, 595], [596, 597], [598, 599]]
    assert packed[99]["y"] == 99


def test_an_iterable_is_written_as_it_comes(memory: MemoryStore) -> None:
    samples = ({"x": np.full((2, 2), i, np.int16), "y": i / 2} for i in range(1000))
    progress: list[PackProgress] = []
    options = PackOptions(format="npy", shard_size=800, limit=120)
    report = pack(samples, memory.uri, options, report=progress.append)
    assert (report.num_samples, report.num_shards, progress[-1].shards_done) == (120, 3, 2)
    packed = penstock.open(memory.uri)
    assert (packed[119]["x"].tolist(), packed[119]["y"]) == ([[119, 119], [119, 119]], 59.5)
    with pytest.raises(OptionError, match="no end to shuffle"):
        pack(iter([{"cls": 1}]), "memory://never/", PackOptions(shuffle=1))


def test_progress_ends_with_everything(images: Path, memory: MemoryStore) -> None:
    progress: list[PackProgress] = []
    report = pack(images, memory.uri, SMALL, report=progress.append)
    assert [p.shards_done for p in progress] == list(range(1, report.num_shards + 1))
    assert (progress[-1].num_samples, progress[-1].size_bytes) == (60, report.size_bytes)


def test_a_real_object_store_is_packed_to(images: Path, s3: Any, memory: MemoryStore) -> None:
    uri = f"{s3.uri.rstrip('/')}/packed/"
    pack(images, uri, SMALL, store=s3.options)
    pack(uri, memory.uri, SMALL, source_store=s3.options)
    wanted = penstock.open(images, decoders=RAW)
    packed = penstock.open(memory.uri, decoders=RAW)
    assert [s["jpeg"] for s in packed] == [s["image"] for s in wanted]
    assert verify(uri, store=s3.options).ok


@pytest.mark.parametrize(
    "options", [{"format": "zip"}, {"shard_size": 0}, {"limit": 0}, {"workers": 0}]
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        PackOptions(**options)
