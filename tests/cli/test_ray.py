"""`--ray` where there is no cluster, and where it makes no sense; dataset/test_ray.py has one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from penstock.errors import install_command
from penstock.testing.ports import free_ports

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_without_the_package_the_answer_is_one_line_with_the_way_out(
    penstock: Run, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty/ray").mkdir(parents=True)
    (tmp_path / "empty/ray/__init__.py").write_text("raise ImportError('not installed')")
    for words in (("index", shards), ("pack", shards, tmp_path / "out")):
        answer = penstock(*words, "--ray", PYTHONPATH=str(tmp_path / "empty"))
        assert (answer.returncode, answer.stdout) == (1, "")
        (line,) = answer.stderr.splitlines()
        assert line == (
            "penstock: error: working on a Ray cluster needs the package 'ray', which is not "
            f"installed: {install_command('ray')}"
        )


def test_an_address_where_nobody_listens_is_named_at_once(penstock: Run, shards: Path) -> None:
    (port,) = free_ports(1)
    answer = penstock("index", shards, "--ray", f"127.0.0.1:{port}")
    assert answer.returncode == 1
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in answer.stderr
    assert "ray start --head" in answer.stderr


def test_threads_and_a_cluster_are_not_counted_together(
    penstock: Run, shards: Path, tmp_path: Path
) -> None:
    answer = penstock("pack", shards, tmp_path / "out", "--workers", 3, "--ray")
    assert answer.returncode == 1
    assert "--workers 3" in answer.stderr
    assert not (tmp_path / "out").exists()
