"""The example runs, and says that it trains as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_example_trains_as_one_process_does() -> None:
    command = [sys.executable, str(ROOT / "examples" / "attach.py")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "2 ranks, 40 steps: weights as on one process: True" in answer.stdout
    assert "Warning" not in answer.stderr
