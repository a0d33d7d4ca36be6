"""Tiers are measured with a file that nobody ever finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import OptionError
from penstock.memory import memory_left_bytes
from penstock.simulate.probe import scratch
from penstock.simulate.probe.copies import copy_curve
from penstock.simulate.probe.link import link_claimed
from penstock.simulate.probe.scratch import ScratchFile
from penstock.simulate.probe.tiers import measure_disk, measure_memory

from .conftest import TINY

FOREVER = """
import sys, time
from pathlib import Path
from penstock.simulate.probe.scratch import ScratchFile
with ScratchFile(Path(sys.argv[1]), 4 << 20) as file:
    file.fill(0.1)
    print(file.size_bytes, flush=True)
    time.sleep(600)
"""


def test_a_disk_has_capacity_latency_and_curves(disk: Path) -> None:
    facts = measure_disk(disk, TINY)
    assert facts.model.kind == "disk"
    assert facts.model.capacity_bytes > 0
    assert facts.model.latency_s > 0
    assert facts.model.read.counts == (1, 2, 4, 8, 16)
    assert "page cache" in facts.note
    assert list(disk.iterdir()) == []


def test_a_memory_tier_is_read_through_a_map() -> None:
    facts = measure_memory(Path("/dev/shm"), 2, TINY)
    assert facts.model.kind == "memory"
    assert 0 < facts.model.capacity_bytes <= memory_left_bytes() * 2
    assert facts.model.read.counts == (1, 2)
    assert "caches may have helped" in facts.note  # the file of this test is a small one


def test_the_file_has_no_name_and_goes_with_an_exception(disk: Path) -> None:
    with pytest.raises(RuntimeError, match="as planned"), ScratchFile(disk, 4 << 20) as file:
        file.fill(0.1)
        assert list(disk.iterdir()) == []
        assert file.size_bytes == os.fstat(file.descriptor).st_size == 4 << 20
        raise RuntimeError("as planned")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)


def test_a_file_system_that_knows_no_nameless_files_gets_one_whose_name_is_gone(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on NFS: a folder cannot be opened for writing.
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    with ScratchFile(disk, 4 << 20) as file:
        file.fill(0.1)
        assert Path(f"/proc/self/fd/{file.descriptor}").readlink().name.endswith(" (deleted)")
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_however_the_process_ends(disk: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FOREVER, str(disk)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{4 << 20}\n"
    process.send_signal(how)
    process.communicate()
    assert list(disk.iterdir()) == []


def test_a_tenth_of_what_is_free_is_the_most(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 25 << 20)
    with ScratchFile(disk, 1 << 30) as file:
        file.fill(60.0)
        assert file.size_bytes == 2 << 20


def test_a_full_disk_is_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 5_000_000)
    with pytest.raises(OptionError, match=r"5 MB free.*name another folder"):
        measure_disk(disk, TINY)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("name", ["/sys/kernel", "/proc", "FILE"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" if name == "FILE" else Path(name)
    with pytest.raises(OptionError, match=r"name a folder that user \d+ may write to"):
        measure_disk(folder, TINY)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        measure_disk(tmp_path / "nowhere", TINY)


def test_reads_through_the_page_cache_never_read_a_place_twice(disk: Path) -> None:
    with ScratchFile(disk, 4 << 20) as file:
        file.fill(0.1)
        once = list(file.places(1 << 20, seed=1))
        assert sorted(once) == [0, 1 << 20, 2 << 20, 3 << 20]
        file.is_direct = True
        places = file.places(1 << 20, seed=1)
        assert [next(places) for _ in range(8)] == once * 2


def test_reads_bring_what_was_written(disk: Path) -> None:
    with ScratchFile(disk, 2 << 20) as file:
        file.fill(0.1)
        file.go_direct()
        file.forget()
        reads = file.reads(iter([0, 1 << 20]), 4096)
        assert list(reads) == [4096, 4096]


def test_copies_have_a_point_for_each_number_of_threads() -> None:
    assert copy_curve(3, TINY, available_bytes=1 << 30).counts == (1, 2, 3)


def test_the_link_is_what_the_interface_claims(tmp_path: Path) -> None:
    routes, interfaces = tmp_path / "route", tmp_path / "net"
    (interfaces / "eth7").mkdir(parents=True)
    routes.write_text("Iface\tDestination\neth3\t0002000A\neth7\t00000000\n")
    (interfaces / "eth7" / "speed").write_text("25000\n")
    link, note = link_claimed(routes, interfaces)
    assert (link.bytes_s, note) == (25e9 / 8, "25 Gbit/s by the word of eth7, not measured")
    for unknown in ("-1\n", "fast\n"):
        (interfaces / "eth7" / "speed").write_text(unknown)
        assert "assumed" in link_claimed(routes, interfaces)[1]
    assert "assumed" in link_claimed(tmp_path / "none", interfaces)[1]
