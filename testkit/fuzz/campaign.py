"""Many inputs, tried in worker processes and watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

HANG_S_MAX = 10.0
MEMORY_BYTES_MAX = 1 << 30
START_S_MAX = 120.0
_GOOD = ("read", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that was neither read nor refused as it should be."""

    subject: str
    seed: int
    number: int
    kind: str
    text: str = ""
    place: str = ""
    trace: str = ""

    @property
    def again(self) -> str:
        """The command that tries it again."""
        options = f"--subject {self.subject} --seed {self.seed} --only {self.number}"
        return f"python -m testkit.fuzz {options}"

    def __str__(self) -> str:
        return (
            f"{self.subject} {self.number}: {self.kind} {self.place}: {self.text}\n  {self.again}"
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the inputs of one subject."""

    subject: str
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    memory_bytes: int = 0
    """The most that one input took."""
    parser_deaths: int = 0
    """Parser processes that inputs ended: refused like any other damage, but worth to be seen."""

    def add(self, other: Tally) -> None:
        """Count what another worker has tried as well."""
        self.counts += other.counts
        self.errors += other.errors
        self.findings += other.findings
        self.memory_bytes = max(self.memory_bytes, other.memory_bytes)
        self.parser_deaths += other.parser_deaths

    @property
    def num_inputs(self) -> int:
        """How many were tried."""
        return self.counts.total()


class _Worker:
    """A worker process, and what it writes to stderr."""

    def __init__(self, seed: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testkit.fuzz.worker", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._rest = b""

    def ask(self, subject: str, number: int) -> dict[str, Any]:
        """Return what became of an input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{subject} {number}\n".encode())
        self._process.stdin.flush()
        try:
            begun = self._line(START_S_MAX)
            assert begun == "begun", begun
            outcome: dict[str, Any] = json.loads(self._line(HANG_S_MAX))
            return outcome
        except TimeoutError:
            return {"number": number, "kind": "hang", "text": f"over {HANG_S_MAX:g} s"}
        except EOFError as error:
            self._errors.seek(0)
            trace = self._errors.read()[-2000:].decode(errors="replace")
            return {"number": number, "kind": "death", "text": str(error), "trace": trace}

    def _line(self, within_s: float) -> str:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([pipe], [], [], within_s)[0]:
                raise TimeoutError
            data = os.read(pipe, 1 << 16)
            if not data:
                code = self._process.wait()
                raise EOFError(signal.Signals(-code).name if code < 0 else f"exit code {code}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End it, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


def tallies_of(inputs: Iterable[tuple[str, int]], seed: int) -> dict[str, Tally]:
    """Try some inputs, one after the other; return what became of those of each subject."""
    tallies: dict[str, Tally] = {}
    worker = None
    try:
        for subject, number in inputs:
            worker = worker or _Worker(seed)
            outcome = worker.ask(subject, number)
            _count(tallies.setdefault(subject, Tally(subject=subject)), seed, outcome)
            if outcome["kind"] in ("hang", "death"):
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()
    return tallies


def _count(tally: Tally, seed: int, outcome: dict[str, Any]) -> None:
    kind = outcome["kind"]
    memory_bytes = outcome.get("memory_bytes", 0)
    tally.memory_bytes = max(tally.memory_bytes, memory_bytes)
    tally.parser_deaths += outcome.get("parser_deaths", 0)
    if memory_bytes > MEMORY_BYTES_MAX:
        kind = "memory"
    tally.counts[kind] += 1
    if "error" in outcome:
        tally.errors[outcome["error"]] += 1
    if kind not in _GOOD:
        tally.findings.append(
            Finding(
                subject=tally.subject,
                seed=seed,
                number=outcome["number"],
                kind=kind,
                text=f"{outcome.get('error', '')} {outcome.get('text', '')}".strip(),
                place=outcome.get("place", ""),
                trace=outcome.get("trace", ""),
            )
        )


def campaign(subjects: Sequence[str], *, count: int, seed: int, num_workers: int) -> list[Tally]:
    """Try `count` inputs, as many of each subject, spread over workers."""
    each = -(-count // len(subjects))
    inputs = [(subject, number) for subject in subjects for number in range(each)]
    # Each worker takes every n-th input, so that none has only slow subjects.
    shares = [inputs[first::num_workers] for first in range(num_workers)]
    total = {subject: Tally(subject=subject) for subject in subjects}
    with ThreadPoolExecutor(num_workers) as pool:
        for tallies in pool.map(lambda share: tallies_of(share, seed), shares):
            for subject, tally in tallies.items():
                total[subject].add(tally)
    return list(total.values())
