"""Indexing and packing on Ray, in a process of their own.

Ray leaves threads and exit handlers in every process that has spoken to a cluster, and a child that
is forked from such a process may crash. Other tests fork.
"""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("ray_cases.py")


@pytest.mark.timeout(900)  # Many processes, which other tests slow down.
def test_everything_that_ray_does_for_us() -> None:
    pytest.importorskip("ray", reason="pip install 'penstock[ray]'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    answer = subprocess.run(
        command, cwd=CASES.parents[2], capture_output=True, text=True, check=False, timeout=870
    )
    assert answer.returncode == 0, answer.stdout[-10_000:] + answer.stderr[-2_000:]
