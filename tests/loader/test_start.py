"""What a process imports before its first batch, and what it must not.

Every module that the starter imports is time before the first batch. The starter cannot be asked
for its modules, but its workers can: they are forks of it.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.engine.spawner import ENGINE_NICE, WORKER_NICE

NOT_IN_A_WORKER = (
    "penstock.cli",
    "penstock.dataset.build_merge",
    "penstock.dataset.build_scan",
    "penstock.dataset.open",
    "penstock.dataset.pack",
    "penstock.dataset.sources",
    "penstock.dataset.verify",
    "penstock.dataset.writer",
    "penstock.loader",
    "penstock.engine.node",
    "penstock.engine.peers",
    "penstock.simulate.probe",
    "penstock.step.program",
    "penstock.simulate",
    "penstock.step",
    "penstock.storage.clients",
    "penstock.storage.locate",
    "penstock.storage.remote",
    "penstock.testing",
    "penstock.torch",
    "obstore",
    "pandas",
    "pyarrow",
    "torch",
)
"""Modules that nothing on the way to a batch of local rows uses."""


def modules_after(code: str, modules: str = "list(sys.modules)") -> list[str]:
    """Return the modules of a fresh interpreter that has run something."""
    program = f"import json, sys\n{code}\nprint(json.dumps({modules}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    return list(json.loads(done.stdout))


def within(modules: list[str], names: tuple[str, ...]) -> list[str]:
    """Return the modules that have one of some names, or lie in a package of that name."""
    return [m for m in modules if any(m == n or m.startswith((f"{n}.", f"{n}_")) for n in names)]


@pytest.fixture
def rows(tmp_path: Path) -> penstock.Dataset:
    np.save(tmp_path / "rows.npy", np.arange(64, dtype=np.int32).reshape(16, 4))
    return penstock.open(tmp_path / "rows.npy")


def told_by_worker(rows: penstock.Dataset, ask: Callable[[], Any], **options: Any) -> Any:
    """Return what a function returns in a worker process."""
    with penstock.Loader(
        rows, batch_size=4, workers=1, collate=lambda samples: ask(), **options
    ) as loader:
        return next(iter(loader))


def loaded() -> list[str]:
    return list(sys.modules)


def test_importing_penstock_imports_nothing_else_of_it() -> None:
    modules = modules_after("import penstock")
    assert {m for m in modules if m.startswith("penstock")} == {"penstock", "penstock.lazy"}
    assert "numpy" not in modules


def test_making_a_loader_does_not_import_torch() -> None:
    modules = modules_after("import penstock; penstock.Loader; penstock.open")
    assert not within(modules, ("torch", "penstock.torch", "obstore", "penstock.dataset.pack"))


def test_a_worker_has_imported_only_what_batches_need(tmp_path: Path) -> None:
    """In a fresh process: the starter of this one keeps what earlier tests had it import."""
    np.save(tmp_path / "rows.npy", np.arange(64, dtype=np.int32).reshape(16, 4))
    modules = modules_after(
        f"""
import penstock
with penstock.Loader(
    penstock.open({str(tmp_path / "rows.npy")!r}),
    batch_size=4,
    workers=1,
    collate=lambda samples: list(sys.modules),
) as loader:
    told = next(iter(loader))
""",
        "told",
    )
    assert "penstock.engine.worker" in modules
    assert within(modules, NOT_IN_A_WORKER) == []


def test_a_worker_with_torch_has_no_front(rows: penstock.Dataset) -> None:
    torch = pytest.importorskip("torch")
    modules = told_by_worker(rows, loaded, transform=lambda s: {"x": torch.tensor(1)})
    assert "penstock.loader.torch.tensors" in modules
    assert (
        within(
            modules,
            ("penstock.loader.loader", "penstock.loader.batch", "penstock.loader.torch.iterable"),
        )
        == []
    )


def test_what_takes_long_to_import_is_imported_once_for_all_loaders(
    rows: penstock.Dataset, tmp_path: Path
) -> None:
    """By the starter, whose children the spawners of all loaders are."""
    (tmp_path / "torchvision.py").write_text("import os\nimporter = os.getpid()\n")
    program = f"""
import os, penstock, torchvision
rows = penstock.open({str(tmp_path / "rows.npy")!r})
told = lambda samples: (torchvision.importer, os.getppid())
for _ in range(2):
    with penstock.Loader(rows, batch_size=4, workers=1, collate=told) as loader:
        print(*next(iter(loader)))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    (importer, spawner), (importer_again, another) = (line.split() for line in out.splitlines())
    assert importer == importer_again
    assert len({importer, spawner, another}) == 3


def collector() -> tuple[bool, bool]:
    return gc.isenabled(), gc.get_freeze_count() > 10_000


def test_a_worker_collects_its_own_garbage_and_leaves_shared_memory_alone(
    rows: penstock.Dataset,
) -> None:
    assert told_by_worker(rows, collector) == (True, True)


def priorities() -> list[int]:
    """Return how nice a worker is, and the process that forked it."""
    return [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, os.getppid())]


def test_who_imports_does_not_stand_back_and_who_works_does(rows: penstock.Dataset) -> None:
    """The training process waits while modules are imported, and trains while batches are made."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    with penstock.Loader(
        rows, batch_size=4, workers=1, collate=lambda samples: priorities()
    ) as loader:
        worker, spawner = next(iter(loader))
        assert loader._client is not None
        engine = os.getpriority(os.PRIO_PROCESS, loader._client.engine_pid)
    assert spawner == here
    assert engine == max(here, ENGINE_NICE)
    assert worker == max(here, WORKER_NICE)


# -- names that are imported when they are used ------------------------------------------------


def seen_by_checkers(package: str) -> dict[str, Any]:
    """Return what type checkers and editors see: what is imported under TYPE_CHECKING."""
    source = Path(importlib.import_module(package).__file__ or "").read_text()
    branch = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    found = {}
    for node in branch.body:
        assert isinstance(node, ast.ImportFrom)
        room = importlib.import_module(node.module or "")
        found |= {alias.name: getattr(room, alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("package", ["penstock", "penstock.storage", "penstock.torch"])
def test_people_and_type_checkers_see_the_same_names(package: str) -> None:
    if package == "penstock.torch":
        pytest.importorskip("torch")
    room = importlib.import_module(package)
    assert {name: getattr(room, name) for name in room.__all__} == seen_by_checkers(package)
    assert set(room.__all__) <= set(dir(room))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'loadr'"):
        penstock.loadr  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'loadr'"):
        exec("from penstock import loadr")


def test_a_star_import_brings_all_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from penstock import *", names)
    assert set(penstock.__all__) <= set(names)


def test_rooms_that_were_imported_before_are_still_found() -> None:
    modules_after("import penstock; penstock.errors.StateError, penstock.order.GlobalOrder")
