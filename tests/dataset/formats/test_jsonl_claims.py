"""JSON lines as Python's own json reads them, in bounded memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

import penstock
from penstock.errors import DecodeError, FormatError

ODD = [
    '{"x": NaN}',
    '{"x": [Infinity, -Infinity]}',
    '{"x": "\\ud800"}',
    '{"x": 123456789012345678901234567890}',
]


def test_what_json_dumps_writes_is_read_as_json_loads_reads_it(tmp_path: Path) -> None:
    values = [json.loads(line) for line in ODD] + [{"x": math.nan}, {"x": {"y": math.inf}}]
    text = "\n".join(json.dumps(v) for v in values)
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "packed.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    for name in ("plain.jsonl", "packed.jsonl.zst"):
        found = list(penstock.open(tmp_path / name))
        assert repr(found) == repr(values)


def test_a_writer_writes_numbers_that_are_not_finite_and_they_come_back(tmp_path: Path) -> None:
    value = {"a": math.nan, "b": [math.inf, None, {"c": -math.inf}]}
    with penstock.Writer(tmp_path / "set") as writer:
        writer.write({"meta.json": value, "score": math.nan, "cls": 1})
    found = penstock.open(tmp_path / "set")[0]
    assert repr(found["meta.json"]) == repr(value)
    assert math.isnan(found["score.json"])


@pytest.mark.parametrize("place", ["first", "later"])
def test_lines_that_are_nested_too_deep_are_named(tmp_path: Path, place: str) -> None:
    deep = '{"x":' + "[" * 5000 + "]" * 5000 + "}"
    lines = [deep] if place == "first" else ['{"x": 1}', deep]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises((FormatError, DecodeError), match=r"a\.jsonl.*not JSON: .*nested too deep"):
        penstock.open(tmp_path / "a.jsonl")[1]


def test_a_file_that_is_one_object_of_many_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({str(i): i for i in range(5000)}))
    with pytest.raises(FormatError, match=r"has 5000 keys.*fields=\[\.\.\.\]"):
        penstock.open(tmp_path / "a.jsonl")
    assert penstock.open(tmp_path / "a.jsonl", fields=["7"])[0] == {"7": 7}


def limited(code: str, *arguments: Any) -> str:
    """Return what a process prints that may take 1 GB of memory beyond what it starts with."""
    head = (
        "import resource, sys, penstock, numpy, zstandard\n"
        "from penstock.dataset import open as _\n"
        "status = open('/proc/self/statm').read().split()\n"
        "used = int(status[0]) * resource.getpagesize() + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


REFUSED = """
from penstock.errors import FormatError
try:
    penstock.open(sys.argv[1])
except FormatError as error:
    print(error)
"""


def test_many_tiny_lines_in_a_small_file_are_refused_in_little_memory(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        for _ in range(17):
            file.write(packer.compress(b"1\n" * (1 << 20)))
        file.write(packer.flush())
    words = limited(REFUSED, tmp_path / "a.jsonl.zst")
    assert "16777216 lines; write it in smaller frames" in words


READ = """
dataset = penstock.open(sys.argv[1])
print(len(dataset), dataset[0], dataset[len(dataset) - 1])
"""


def test_blocks_up_to_the_bound_are_read_in_little_memory(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        for number in range(4):
            file.write(packer.compress(b"%d\n" % number * (1 << 20)))
        file.write(packer.flush())
    assert limited(READ, tmp_path / "a.jsonl.zst") == f"{1 << 22} {{'value': 0}} {{'value': 3}}\n"
