"""A process that tries inputs: numbers come in by stdin, outcomes go out by stdout.

It dies or hangs where an input makes it; the campaign notices and starts another one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from random import Random

from penstock.dataset.parse_process import num_parser_deaths
from penstock.errors import PenstockError
from testkit.fuzz.subjects import Subject, WrongDataError, all_subjects

ADDRESS_SPACE_BYTES = 4 << 30
"""Beyond what the process has at its start: it must not take the machine along."""


_dead_threads: list[BaseException] = []
"""What ended threads of this process: nobody else would hear of it."""


def random_of(subject: str, seed: int, number: int) -> Random:
    """Return the random numbers that make one input."""
    return Random(f"{subject}/{seed}/{number}")


def tried(subject: Subject, seed: int, number: int, folder: Path) -> dict[str, object]:
    """Return what became of one input."""
    random = random_of(subject.name, seed, number)
    folder.mkdir()
    before_bytes, before_deaths = _reset_peak(), num_parser_deaths()
    outcome: dict[str, object] = {"number": number, "kind": "read"}
    try:
        subject.try_one(random, folder)
        if _dead_threads:
            raise _dead_threads.pop()
    except PenstockError as error:
        outcome |= {"kind": "refused", "error": type(error).__name__, "text": str(error)}
    except WrongDataError as error:
        outcome |= {"kind": "wrong data", "text": str(error), "place": ""}
    except Exception as error:
        outcome |= {
            "kind": "foreign exception",
            "error": type(error).__name__,
            "text": str(error)[:300],
            "place": _place(error),
            "trace": traceback.format_exc(limit=-6),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome | {
        "memory_bytes": _peak_bytes() - before_bytes,
        "parser_deaths": num_parser_deaths() - before_deaths,
    }


def _place(error: BaseException) -> str:
    """Return the innermost frame of Penstock's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "penstock" in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.name}"


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _reset_peak() -> int:
    """Let the kernel forget the highest use of memory so far; return the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


class Subjects:
    """The subjects that were asked for so far, prepared below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Subject] = {}

    def named(self, name: str) -> Subject:
        """Return a subject with its good input."""
        if name not in self._made:
            os.environ |= {"PENSTOCK_CACHE": str(self._folder / "cache"), "PENSTOCK_NODE": "none"}
            subject, good = all_subjects()[name](), self._folder / f"good-{name}"
            good.mkdir()
            subject.prepare(good)
            self._made[name] = subject
        return self._made[name]


def main() -> None:
    """Try one input after the other until stdin ends: a line has a subject and a number."""
    seed = int(sys.argv[1])
    threading.excepthook = lambda dead: _dead_threads.append(dead.exc_value or SystemExit())
    # Outcomes have a channel of their own: what is tried may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as text:
        subjects = Subjects(Path(text))
        limit = _status("VmSize") + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for line in sys.stdin:
            name, number = line.split()
            subject = subjects.named(name)
            print("begun", file=answers, flush=True)
            outcome = tried(subject, seed, int(number), Path(text) / "tried")
            print(json.dumps(outcome), file=answers, flush=True)


if __name__ == "__main__":
    main()
