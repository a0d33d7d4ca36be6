"""The fuzzer in its short form: a few damaged inputs of every kind, the same ones each time.

`python -m testkit.fuzz` is the long form.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from random import Random

import pytest
from testkit.fuzz import campaign as watched
from testkit.fuzz import worker
from testkit.fuzz.campaign import campaign, tallies_of
from testkit.fuzz.mutate import mutated
from testkit.fuzz.subjects import WrongDataError, all_subjects

import penstock
from penstock.dataset.formats import FORMATS

INPUTS_EACH = 12


def test_every_input_is_read_or_refused() -> None:
    names = list(all_subjects())
    tallies = campaign(names, count=INPUTS_EACH * len(names), seed=11, num_workers=1)
    findings = [str(finding) for tally in tallies for finding in tally.findings]
    assert not findings, "\n".join(findings)
    assert all(tally.num_inputs == INPUTS_EACH for tally in tallies)


class _Hurt:
    """A subject that does what its number says."""

    name = "hurt"

    def prepare(self, folder: Path) -> None:
        pass

    def try_one(self, random: Random, folder: Path) -> None:
        raise WrongDataError("other values") if random.random() < 0.5 else KeyError("x")


def test_wrong_data_and_foreign_exceptions_are_findings(tmp_path: Path) -> None:
    kinds = {worker.tried(_Hurt(), 1, n, tmp_path / "x")["kind"] for n in range(20)}
    assert kinds == {"wrong data", "foreign exception"}


class _EndsParser:
    """A subject of which every input ends the process that parses it."""

    name = "ends"

    def prepare(self, folder: Path) -> None:
        pass

    def try_one(self, random: Random, folder: Path) -> None:
        (folder / "a.lines").write_text("scan:abort\n")
        penstock.open(folder)


def test_a_parser_that_an_input_ends_is_counted_and_the_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "dataset"))
    monkeypatch.setitem(FORMATS, "lines", importlib.import_module("parse_cases").LineFormat())
    outcome = worker.tried(_EndsParser(), 1, 1, tmp_path / "x")
    assert (outcome["kind"], outcome["parser_deaths"]) == ("refused", 1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "death"),
        ("time.sleep(60)", "hang"),
        ("raise IndexError", "death"),
    ],
)
def test_a_death_and_a_hang_are_findings_and_the_next_input_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, kind: str
) -> None:
    good = json.dumps({"number": 2, "kind": "read", "memory_bytes": 0})
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "for line in sys.stdin:\n"
        "    print('begun', flush=True)\n"
        f"    if line == 'x 1\\n': {code}\n"
        f"    print({good!r}, flush=True)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {watched.sys.executable} {program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(watched.sys, "executable", str(python))
    monkeypatch.setattr(watched, "HANG_S_MAX", 0.5)
    tally = tallies_of([("x", 1), ("x", 2)], seed=1)["x"]
    assert dict(tally.counts) == {kind: 1, "read": 1}
    assert [finding.number for finding in tally.findings] == [1]


def test_damage_depends_on_its_seed_alone_and_changes_something() -> None:
    data = json.dumps({"a": [1, 2, {"b": "c"}], "d": 5}).encode() * 3
    made = [mutated(Random(seed), data) for seed in range(200)]
    assert made == [mutated(Random(seed), data) for seed in range(200)]
    assert len(set(made)) > 150
    assert sum(each != data for each in made) > 190
