"""Tests that mostly wait, run beside the others.

Launchers, trainers and clusters take seconds to start and hardly use a core meanwhile. In a run of
everything, tests with the mark `alongside` are given to a second pytest, which runs them one after
the other; here they come last, and what the other said of each is reported as if it had been run
here. A run of few tests has no second pytest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

TOLD = "PENSTOCK_TESTS_ALONGSIDE"
"""The file to which the second pytest reports."""
MANY_TESTS = 1000
"""With fewer there is nothing to run them beside."""
LOOK_S = 0.2
_TUPLES = ("longrepr", "location")


def register(config: pytest.Config) -> None:
    """Be the second pytest if somebody waits for reports, else the first."""
    told = os.environ.pop(TOLD, None)
    plugin = Second(config, Path(told)) if told else First(config)
    config.pluginmanager.register(plugin, "penstock-alongside")


class Second:
    """Writes down what became of each test."""

    def __init__(self, config: pytest.Config, told: Path) -> None:
        self._config, self._told = config, told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        made = hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._told.open("a") as file:
            file.write(json.dumps(made) + "\n")


class First:
    """Starts the second, and reports what it says."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-alongside-")
        self._told, self._log = (Path(self._folder.name, name) for name in ("told", "log"))
        self._second: subprocess.Popen[bytes] | None = None
        self._given: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if len(items) < MANY_TESTS:
            return
        items.sort(key=lambda item: item.get_closest_marker("alongside") is not None)
        self._given = {item.nodeid for item in items if item.get_closest_marker("alongside")}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        given = [item.nodeid for item in session.items if item.nodeid in self._given]
        if not given or session.config.option.collectonly:
            return
        self._told.touch()
        with self._log.open("wb") as log:
            self._second = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *given],
                cwd=session.config.rootpath,
                env=os.environ | {TOLD: str(self._told)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self._second is None or item.nodeid not in self._given:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(self._second, item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_unconfigure(self) -> None:
        if self._second is not None:
            if self._second.poll() is None:
                os.killpg(self._second.pid, signal.SIGTERM)
            self._second.wait()
        self._folder.cleanup()

    def _reports(self, second: subprocess.Popen[bytes], item: pytest.Item) -> list[Any]:
        """Wait until a test is over there and return its reports."""
        while True:
            is_over = second.poll() is not None
            found = [one for one in self._said() if one["nodeid"] == item.nodeid]
            if any(one["when"] == "teardown" for one in found):
                return [self._report(one) for one in found]
            if is_over:
                return [self._missing(item)]
            time.sleep(LOOK_S)

    def _report(self, said: dict[str, Any]) -> Any:
        # JSON has no tuples, and pytest wants them.
        said = {k: tuple(v) if k in _TUPLES and isinstance(v, list) else v for k, v in said.items()}
        return self._config.hook.pytest_report_from_serializable(config=self._config, data=said)

    def _said(self) -> list[dict[str, Any]]:
        # A line without its end is still being written.
        whole = self._told.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def _missing(self, item: pytest.Item) -> pytest.TestReport:
        said = self._log.read_text(errors="replace")[-4000:]
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the second pytest ended before this test:\n{said}",
            when="call",
        )
