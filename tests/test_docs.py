"""The documentation is true: its links resolve, its Python runs, its examples print what they say.

Pages are checked by `tools/check_docs.py` in one go, several at a time, from a process that has
imported torch once; each page has its own test here, which looks up what became of it.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHECKER = runpy.run_path(str(ROOT / "tools" / "check_docs.py"), run_name="check_docs")
PAGES = [page.relative_to(ROOT).as_posix() for page in CHECKER["pages"]()]
EXAMPLES = {
    "read_your_data": "parquet  parquet  by blocks",
    "resume_anywhere": "promised   3000 samples  ca92d18e2523dada",
    "mixture": "books     6 a batch wanted, 6 to 6 given",
    "custom_format": "pairs: 30 samples, fields x, y",
    "pack_your_own": "verify: 1 problem in 400 samples",
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each page that a test was chosen for; empty where nothing is."""
    chosen = [
        str(ROOT / item.callspec.params["page"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and "page" in item.callspec.params
    ]
    command = [sys.executable, str(ROOT / "tools" / "check_docs.py"), "--json", *chosen]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert answer.stdout, answer.stderr
    results = [json.loads(line) for line in answer.stdout.splitlines()]
    return {result["page"]: result["failure"] for result in results}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(failures: dict[str, str], page: str) -> None:
    assert failures[page] == ""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_says_what_it_should(tmp_path: Path, name: str) -> None:
    answer = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert EXAMPLES[name] in answer.stdout


# -- the checker itself -----------------------------------------------------------------------


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Check one page of text and return what is wrong with it."""
    checked = runpy.run_path(str(ROOT / "tools" / "check_docs.py"), run_name="check_docs")
    globals_: dict[str, Any] = checked["check"].__globals__
    monkeypatch.setitem(globals_, "ROOT", tmp_path)

    def run(text: str) -> str:
        (tmp_path / "page.md").write_text(text)
        (result,) = checked["check"]([tmp_path / "page.md"], 1)
        return str(result.failure)

    return run


def test_the_checker_runs_blocks_of_a_page_in_one_namespace(check: Callable[[str], str]) -> None:
    assert check("```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n") == ""


def test_the_checker_names_the_page_and_line_of_an_error(check: Callable[[str], str]) -> None:
    failure = check("# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    assert '"page.md", line 5' in failure
    assert "AssertionError" in failure


def test_the_checker_leaves_out_what_says_so(check: Callable[[str], str]) -> None:
    assert check("<!-- not run: no such module -->\n```python\nimport nowhere\n```\n") == ""


def test_the_checker_writes_files_and_runs_hidden_setup(check: Callable[[str], str]) -> None:
    page = "<!-- setup\ny = 2\n-->\n```python\n# file: mine.py\nz = 3\n```\n"
    assert check(page + "```python\nimport mine\nassert y + mine.z == 5\n```\n") == ""


def test_the_checker_compares_transcripts(check: Callable[[str], str]) -> None:
    assert check("```console\n$ echo took 3 ms\ntook 87 ms\n```\n") == ""
    assert "+hello" in check("```console\n$ echo hello\ngoodbye\n```\n")


@pytest.mark.parametrize("target", ["nowhere.md", "page.md#no-such-heading"])
def test_the_checker_finds_broken_links(check: Callable[[str], str], target: str) -> None:
    assert target in check(f"# A heading\n\n[there]({target})\n")
    assert check("# A heading\n\n[here](#a-heading) [out](https://example.com)\n") == ""
