"""Questions to one GPU: asked one after the other, and what failed is said at the end.

Of Penstock only the rooms `program` and `step` are needed, so the packages of data loading may be
missing: a benchmark calls `stand_alone` before it imports them.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parents[1] / "src"


def stand_alone() -> None:
    """Make `penstock.step.program` and `penstock.step` importable where the rest is not."""
    if str(SOURCES) not in sys.path:
        sys.path.insert(0, str(SOURCES))
    if importlib.util.find_spec("xxhash") is None:
        hashes = types.ModuleType("xxhash")

        def digest(data: bytes) -> str:
            return hashlib.blake2b(data, digest_size=16).hexdigest()

        hashes.xxh3_128_hexdigest = digest  # type: ignore[attr-defined]
        sys.modules["xxhash"] = hashes
    try:
        import penstock  # noqa: F401
    except ImportError:
        room = types.ModuleType("penstock")
        room.__path__ = [str(SOURCES / "penstock")]
        for name in [n for n in sys.modules if n.startswith("penstock")]:
            del sys.modules[name]
        sys.modules["penstock"] = room


class Report:
    """What was found."""

    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds, self.quick = rounds, quick
        self.data: dict[str, Any] = {}

    def say(self, text: str, **figures: Any) -> None:
        print(text, flush=True)
        self.data |= figures


def ask(
    question: str,
    questions: Mapping[str, Callable[[Any], None]],
    report_of: Callable[[int, bool], Report] = Report,
    *,
    rounds: int,
) -> None:
    """Ask what the command line wants to know."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing of this can be measured")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    report = report_of(options.rounds, options.quick)
    wanted = options.only.split(",") if options.only else list(questions)
    failed = [name for name in questions if name in wanted and not _asked(name, questions, report)]
    if options.json:
        Path(options.json).write_text(json.dumps(report.data, indent=1))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _asked(name: str, questions: Mapping[str, Callable[[Any], None]], report: Report) -> bool:
    """Ask one; return whether it was answered."""
    begin = time.perf_counter()
    try:
        with torch.no_grad():
            questions[name](report)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        torch.cuda.empty_cache()
        print(f"   ({name} took {time.perf_counter() - begin:.0f} s)", flush=True)
    return True
