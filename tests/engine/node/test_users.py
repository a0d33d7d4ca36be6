"""Several users at one service: real users, so only root can try it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.node.jobs import Folders, StartedNode, become, begin_job

from penstock.engine.peers.local import LocalNode
from penstock.errors import PeerError
from penstock.testing.forks import in_child

ANNA, BERT, LAB = 54_321, 54_322, 54_300

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

Start = Callable[..., StartedNode]


@dataclass
class Told:
    """What a job saw."""

    base: str
    mode: int
    owner: int
    held: int
    """Units, at its beginning."""
    held_at_end: int
    refused: str
    """What it was told when it tried to register Anna's run."""


def run_of(user: int) -> dict[str, bytes]:
    return {"run_id": user.to_bytes(16, "little"), "secret": user.to_bytes(32, "little")}


def job_of(user: int, node: StartedNode, units: range, *, group: int | None = None) -> Told:
    """Run a job as another user: it fills units and registers its run."""

    def work() -> Told:
        os.umask(0o077)
        become(user, group or user)
        job = begin_job(node)
        held, refused = job.held(), ""
        job.fill(units)
        job.node.register(dataset="data", **run_of(user))
        try:
            job.node.register(dataset="data", **run_of(ANNA))
        except PeerError as error:
            refused = str(error)
        base = job.opened.tiers[0].path
        status = Path(base).stat()
        told = Told(base, stat.S_IMODE(status.st_mode), status.st_uid, held, job.held(), refused)
        job.end()
        return told

    return in_child(work)


def test_users_have_tiers_of_their_own_that_nobody_else_can_look_into(start: Start) -> None:
    node = start()
    anna = job_of(ANNA, node, range(10))
    assert (anna.mode, anna.owner) == (0o700, ANNA)
    bert = job_of(BERT, node, range(5))
    assert bert.base != anna.base
    assert (bert.held, bert.held_at_end) == (0, 5)
    assert "by another user" in bert.refused
    look = subprocess.run(["ls", anna.base], capture_output=True, check=False, user=BERT)
    assert look.returncode != 0
    assert job_of(ANNA, node, range(0)).held == 10


def test_a_service_of_an_ordinary_user_is_for_that_user(
    start: Start, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (folders.memory, folders.disk):
        os.chown(folder, ANNA, ANNA)
    node = start(user=ANNA)
    assert job_of(ANNA, node, range(10)).held_at_end == 10
    assert LocalNode.connect(node.socket) is None
    assert f"runs as user {ANNA}, and we are user 0" in caplog.text


@pytest.mark.parametrize(("share", "group"), [("group", LAB), ("all", None)])
def test_those_who_share_find_what_others_have_read(
    start: Start, share: str, group: int | None
) -> None:
    node = start(share=share)
    anna = job_of(ANNA, node, range(10), group=group)
    bert = job_of(BERT, node, range(10, 20), group=group)
    assert bert.base == anna.base
    assert (bert.held, bert.held_at_end) == (10, 20)
    assert job_of(ANNA, node, range(0), group=group).held == 20
    if share == "group":
        assert job_of(BERT, node, range(0)).base != anna.base


def test_a_file_that_a_user_cuts_short_costs_the_service_nothing(start: Start) -> None:
    node = start()

    def work() -> None:
        become(ANNA, ANNA)
        job = begin_job(node)
        job.fill(range(10))
        job.node.register(dataset="data", **run_of(ANNA))
        for name in ("data", "state", "sums"):
            os.truncate(f"{job.tiers.tiers[0].path}/{name}", 0)
        job.node.close()
        os._exit(0)

    if (pid := os.fork()) == 0:
        work()
    os.waitpid(pid, 0)
    assert job_of(BERT, node, range(5)).held_at_end == 5
