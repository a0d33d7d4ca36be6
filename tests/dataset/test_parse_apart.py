"""Indexing, packing and verifying outlive every file: what ends a parser is an error or a finding.

`parse_cases` has formats that do what damaged files make native code do, for real.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import penstock
from penstock.dataset import parse_process
from penstock.dataset.formats import FORMATS
from penstock.errors import ChangedError, DecodeError, FormatError
from penstock.storage.folder import FolderStore

sys.path.insert(0, str(Path(__file__).parent))
import parse_cases

DEADLY = [
    ("segv", "SIGSEGV"),
    ("abort", "SIGABRT"),
    ("bus", "SIGBUS"),
    ("stack", "SIGSEGV"),
    ("hang", "did not end"),
    ("spin", "did not end"),
    ("memory", "MemoryError"),
]


@pytest.fixture(autouse=True)
def own_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(FORMATS, "lines", parse_cases.LineFormat())
    monkeypatch.setitem(FORMATS, "pairs", parse_cases.LinePairs())


def lines_set(folder: Path, ending: str = "lines", **files: list[str]) -> Path:
    folder.mkdir()
    for name, lines in files.items():
        (folder / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in lines))
    return folder


# -- indexing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "said"), DEADLY)
def test_a_file_that_ends_its_scan_is_an_error_that_names_it(
    tmp_path: Path, word: str, said: str
) -> None:
    bad = lines_set(tmp_path / "bad", a=["one"], b=[f"scan:{word}"])
    with pytest.raises(FormatError, match=rf"b\.lines cannot be read.*{said}"):
        penstock.open(bad)
    good = lines_set(tmp_path / "good", a=["one", "two"])
    assert [sample["text"] for sample in penstock.open(good)] == ["one", "two"]


def test_a_format_of_the_users_is_scanned_in_another_process(tmp_path: Path) -> None:
    options = penstock.open(lines_set(tmp_path / "set", a=["one"])).parts[0].options
    assert os.getpid() not in (options["units"], options["scan"])


def test_a_format_that_cannot_be_sent_is_scanned_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(parse_cases.LineFormat):
        """It holds something that stays in its process."""

        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    monkeypatch.setitem(FORMATS, "lines", Local())
    dataset = penstock.open(lines_set(tmp_path / "set", a=["one", "two"]))
    assert penstock.verify(dataset).ok
    assert dataset.parts[0].options["scan"] == os.getpid()


def test_an_error_of_the_store_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lines_set(tmp_path / "set", a=["one"])
    raised = ChangedError("it is another one now")

    def fail(*_: Any) -> memoryview:
        raise raised

    monkeypatch.setattr(FolderStore, "read_range", fail)
    with pytest.raises(ChangedError) as caught:
        penstock.open(folder)
    assert caught.value is raised


def test_names_that_are_not_text_reach_the_parser(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.lines")).write_text("one\n")
    assert penstock.open(folder)[0] == {"text": "one"}


CALLER = """
import sys
from pathlib import Path
import penstock
folder = Path(sys.argv[1])
options = {format: penstock.PackOptions(format=format) for format in ("tar", "npy")}
if folder.suffix != ".csv":
    assert len(penstock.open(folder)) == 4
    assert penstock.verify(folder).ok
    penstock.pack(folder, folder.parent / "tar", options["tar"])
penstock.pack(folder, folder.parent / "npy", options["npy"])
native = {"pyarrow", "simplejpeg", "PIL"} & set(sys.modules)
assert not native, native
"""


def image_set(folder: Path) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(4):
            pixels = np.full((8, 8, 3), i, np.uint8)
            data = simplejpeg.encode_jpeg(pixels)
            info = tarfile.TarInfo(f"{i}.jpg")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def table_set(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": range(4)}), folder / "a.parquet")


def listed_set(folder: Path) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    (folder / "a.jpg").write_bytes(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)))
    (folder / "a.csv").write_text("file,label\na.jpg,3\na.jpg,4\n")


@pytest.mark.parametrize("make", [image_set, table_set, listed_set])
def test_the_caller_never_loads_a_native_parser(tmp_path: Path, make: Any) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    make(folder)
    done = subprocess.run(
        [sys.executable, "-c", CALLER, str(folder / "a.csv" if make is listed_set else folder)],
        env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(map(int, listed.split()))


def test_compressed_lines_are_scanned_apart_and_tar_is_not(tmp_path: Path) -> None:
    for name in ("zst", "tar"):
        (tmp_path / name).mkdir()
    text = "".join(f"{json.dumps({'n': i})}\n" for i in range(50)).encode()
    (tmp_path / "zst" / "a.jsonl.zst").write_bytes(zstandard.compress(text))
    image_set(tmp_path / "tar")
    parse_process._pool.close()
    before = children()
    assert len(penstock.open(tmp_path / "tar")) == 4
    assert children() == before
    assert [sample["n"] for sample in penstock.open(tmp_path / "zst")] == list(range(50))
    assert len(children() - before) == 1


# -- verify ----------------------------------------------------------------------------------------


def test_a_sample_that_ends_its_process_is_a_finding_and_the_others_are_checked(
    tmp_path: Path,
) -> None:
    lines = [f"line {i}" for i in range(40)]
    bad = dict(zip((0, 1, 7, 19, 20, 21, 39), DEADLY, strict=True))
    for number, (word, _) in bad.items():
        lines[number] = f"split:{word}"
    folder = lines_set(tmp_path / "set", a=lines[:20], b=lines[20:], c=["last"])
    report = penstock.verify(folder)
    assert report.num_samples == 41
    assert [problem.sample_id for problem in report.problems] == list(bad)
    for problem, (number, (_, said)) in zip(report.problems, bad.items(), strict=True):
        assert problem.kind == "decode"
        assert problem.object == ("a.lines" if number < 20 else "b.lines")
        assert said in problem.message
        assert problem.message.startswith(f"sample {number} in ")


def test_a_block_that_ends_its_process_is_a_finding_and_so_is_a_row(tmp_path: Path) -> None:
    lines = ["a", "b", "unpack:segv", "c", "d", "split:abort", "e", "f"]
    report = penstock.verify(lines_set(tmp_path / "set", ending="pairs", a=lines))
    found = [(problem.kind, problem.sample_id) for problem in report.problems]
    assert found == [("block", 2), ("decode", 5)]
    assert "SIGSEGV" in report.problems[0].message
    assert "row 1" in report.problems[1].message


def test_a_block_is_unpacked_apart_though_nothing_is_decoded(tmp_path: Path) -> None:
    folder = lines_set(tmp_path / "set", ending="pairs", a=["a", "b", "unpack:segv", "split:segv"])
    report = penstock.verify(folder, decode=False)
    assert [(problem.kind, problem.sample_id) for problem in report.problems] == [("block", 2)]


def test_a_format_that_the_parser_cannot_import_is_used_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made_in_a_notebook")

    class Known(parse_cases.LineFormat):
        pass

    Known.__module__, Known.__qualname__ = module.__name__, "Known"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(module, "Known", Known, raising=False)
    monkeypatch.setitem(FORMATS, "lines", Known())
    dataset = penstock.open(lines_set(tmp_path / "set", a=["one", "two"]))
    assert dataset.parts[0].options["scan"] == os.getpid()
    assert penstock.verify(dataset).ok
    assert penstock.pack(dataset, tmp_path / "packed").num_samples == 2


def test_a_set_that_is_indexed_starts_no_process(tmp_path: Path) -> None:
    folder = lines_set(tmp_path / "set", a=["one", "two"])
    penstock.open(folder)
    parse_process._pool.close()
    before = children()
    assert len(penstock.open(folder)) == 2
    assert children() == before


def test_a_run_in_which_all_end_their_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.dataset.samples_in_parser._DEATHS_MAX", 2)
    monkeypatch.setattr("penstock.dataset.verify_samples._RUNS_MIN", 1)
    report = penstock.verify(lines_set(tmp_path / "set", a=["split:abort"] * 6))
    assert ["SIGABRT" in problem.message for problem in report.problems] == [True, True, False]
    assert "4 samples from here on were not looked at" in report.problems[2].message


def test_decoders_of_the_users_run_in_the_caller(tmp_path: Path) -> None:
    seen: list[int] = []

    def decode(data: memoryview) -> str:
        seen.append(os.getpid())
        text = str(data, "utf-8")
        if text == "bad":
            raise KeyError(text)
        return text.upper()

    folder = lines_set(tmp_path / "set", a=["one", "bad", "three"])
    dataset = penstock.open(folder, decoders={"text": decode})
    report = penstock.verify(dataset)
    assert [problem.sample_id for problem in report.problems] == [1]
    assert "KeyError" in report.problems[0].message
    assert set(seen) == {os.getpid()}
    assert len(seen) == 3


def test_a_decoder_that_is_left_out_decodes_nothing_there_either(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    image_set(tmp_path / "set")
    path = tmp_path / "set" / "a.tar"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\xff\xd8\xff", b"\0\0\0"))
    assert penstock.verify(tmp_path / "set").num_problems == 4
    assert penstock.verify(penstock.open(tmp_path / "set", decoders={"jpg": None})).ok


# -- pack ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["lines", "pairs"])
def test_a_sample_that_ends_its_process_ends_a_pack_with_its_name(
    tmp_path: Path, ending: str
) -> None:
    folder = lines_set(tmp_path / "set", ending=ending, a=["a", "b", "c", "split:segv"])
    with pytest.raises(FormatError, match=rf"sample 3 in .*a\.{ending} cannot be read.*SIGSEGV"):
        penstock.pack(folder, tmp_path / "packed")
    good = lines_set(tmp_path / "good", ending=ending, a=["a", "b"])
    penstock.pack(good, tmp_path / "packed")
    assert [s["text.txt"] for s in penstock.open(tmp_path / "packed")] == ["a", "b"]


def test_a_block_that_ends_its_process_ends_a_pack_with_its_place(tmp_path: Path) -> None:
    folder = lines_set(tmp_path / "set", ending="pairs", a=["a", "b", "unpack:abort", "d"])
    with pytest.raises(FormatError, match=r"the block from sample 2 in .*a\.pairs.*SIGABRT"):
        penstock.pack(folder, tmp_path / "packed")


def test_a_shuffled_pack_holds_what_the_source_holds(tmp_path: Path) -> None:
    words = [f"line {i}" for i in range(50)]
    for ending in ("lines", "pairs"):
        folder = lines_set(tmp_path / ending, ending=ending, a=words[:20], b=words[20:])
        target = tmp_path / f"packed-{ending}"
        penstock.pack(folder, target, penstock.PackOptions(shuffle=3, shard_size="20KB"))
        assert sorted(s["text.txt"] for s in penstock.open(target)) == sorted(words)


def test_values_of_every_kind_are_packed_as_they_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "set").mkdir()
    times = pa.array([10**9 * i for i in range(6)], pa.timestamp("us", tz="Europe/Berlin"))
    table = pa.table(
        {
            "number": pa.array(range(6), pa.int16()),
            "big": pa.array([2**64 - 1] * 6, pa.uint64()),
            "text": ["ä" * i for i in range(6)],
            "ragged": [[1.5] * i for i in range(6)],
            "struct": [{"a": i, "b": [str(i)]} for i in range(6)],
            "map": pa.array([[("k", i)] for i in range(6)], pa.map_("string", "int32")),
            "bytes": [bytes(i) for i in range(6)],
            "some": pa.array([i if i % 2 else None for i in range(6)]),
            "time": times,
            "nano": pa.array(range(6), pa.timestamp("ns")),
            "date": pa.array(range(6), pa.date32()),
        }
    )
    pq.write_table(table, tmp_path / "set" / "a.parquet", row_group_size=4)
    source = penstock.open(tmp_path / "set")
    packed = penstock.pack(source, tmp_path / "apart")
    with penstock.Writer(tmp_path / "here") as writer:
        from penstock.dataset.sources import tar_fields

        (bound,) = source.bound
        for i in range(6):
            writer.write(tar_fields(bound, bound.unpack(i).sample(i % 4), i))
    assert packed.num_samples == 6
    both = penstock.open(tmp_path / "apart"), penstock.open(tmp_path / "here")
    for one, two in zip(*both, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_equal(one[name], two[name])


def test_a_decoder_of_the_users_packs_what_it_makes(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    image_set(tmp_path / "set")
    pids: list[int] = []

    def small(data: memoryview) -> np.ndarray:
        pids.append(os.getpid())
        return np.array([len(data)], np.int64)

    dataset = penstock.open(tmp_path / "set", decoders={"jpg": small})
    penstock.pack(dataset, tmp_path / "packed", penstock.PackOptions(format="npy"))
    sizes = [int(sample["jpg"][0]) for sample in penstock.open(tmp_path / "packed")]
    assert len(sizes) == 4
    assert min(sizes) > 100
    assert set(pids) == {os.getpid()}


def test_a_generator_is_packed_in_the_caller(tmp_path: Path) -> None:
    samples = ({"txt": f"{os.getpid()} {i}"} for i in range(3))
    penstock.pack(samples, tmp_path / "packed")
    found = [sample["txt"] for sample in penstock.open(tmp_path / "packed")]
    assert found == [f"{os.getpid()} {i}" for i in range(3)]


def test_an_image_beside_a_table_is_decoded_apart(tmp_path: Path) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    (tmp_path / "good.jpg").write_bytes(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)))
    (tmp_path / "bad.jpg").write_bytes(b"no image at all")
    (tmp_path / "good.csv").write_text("file,label\ngood.jpg,3\ngood.jpg,4\n")
    (tmp_path / "bad.csv").write_text("file,label\ngood.jpg,3\nbad.jpg,4\n")
    options = penstock.PackOptions(format="npy")
    penstock.pack(tmp_path / "good.csv", tmp_path / "packed", options)
    assert [int(s["cls"]) for s in penstock.open(tmp_path / "packed")] == [3, 4]
    with pytest.raises(DecodeError, match=r"row 3 of .*bad\.csv could not be decoded"):
        penstock.pack(tmp_path / "bad.csv", tmp_path / "other", options)
