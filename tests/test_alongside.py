"""What a second pytest finds is what the first one says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests import alongside

alongside.MANY_TESTS = 2


def pytest_configure(config):
    config.addinivalue_line("markers", "alongside: as in the real ones")
    alongside.register(config)
"""
CASES = """
import os

import pytest

FIRST = os.environ.setdefault("CASES_FIRST", str(os.getpid()))


def test_here():
    assert str(os.getpid()) == FIRST


@pytest.mark.alongside
def test_there():
    assert str(os.getpid()) != FIRST


@pytest.mark.alongside
def test_wrong():
    assert 1 == 2


@pytest.mark.alongside
def test_left_out():
    pytest.skip("for a reason")


@pytest.mark.alongside
def test_deadly():
    os._exit(3)
"""


def test_results_of_the_second_are_those_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = answer.stdout
    assert "2 failed, 2 passed, 1 skipped" in said, said
    assert "assert 1 == 2" in said
    assert "the second pytest ended before this test" in said
    assert "for a reason" in said
