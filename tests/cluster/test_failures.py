"""Things that happen to a node in the middle of an epoch: what all deliver stays right."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cluster_job import Job, delivered, expected, last_common
from benchmarks.cluster_site import Site
from benchmarks.failures_cases import send, spoil
from tests.cluster.small import BY_HAND, HALF, JOB_S, NUM_SAMPLES, STEPS, run, task_of

LATER = STEPS - 1
"""Steps that cannot be done without what the node in trouble keeps."""


@contextlib.contextmanager
def held(
    site: Site, folder: Path, at: tuple[int, int], num_nodes: int, **more: Any
) -> Iterator[Job]:
    """Yield a job all of whose ranks wait after a step; it goes on when the block says `go`."""
    task = task_of(site, folder, hold_at=at, **more)
    with Job(task, site.nodes[:num_nodes], BY_HAND) as job:
        job.wait_for_step(at[0] * STEPS + at[1], range(num_nodes))
        yield job


def check(job: Job) -> None:
    """Every rank has come to its end, and all of it was right."""
    assert [end["num_wrong"] for end in job.ends()] == [0] * len(job.hosts)
    assert delivered(job.path) == expected(NUM_SAMPLES, job.task)


def test_a_killed_node_costs_nothing_but_its_share_and_the_job_resumes_with_fewer(
    site: Site, tmp_path: Path
) -> None:
    with held(site, tmp_path, (0, HALF), 3) as job:
        site.nodes[2].kill()
        job.go()
        job.wait(timeout_s=JOB_S, hosts=site.nodes[:2])
        survivors = job.ends()
        state = last_common(job, range(3))
    assert [end["num_wrong"] for end in survivors] == [0, 0]
    assert all("n2" in end["summary"] for end in survivors)
    run(dataclasses.replace(job.task, attempt=1, state=state), site.nodes[:2])
    assert delivered(tmp_path) == expected(NUM_SAMPLES, job.task)


def test_a_frozen_node_holds_up_nobody_and_goes_on_when_it_wakes(
    site: Site, tmp_path: Path
) -> None:
    with held(site, tmp_path, (0, HALF), 3) as job:
        send(site.nodes[1], signal.SIGSTOP)
        job.go()
        job.wait_for_step(LATER, [0, 2])
        send(site.nodes[1], signal.SIGCONT)
        job.wait(timeout_s=JOB_S)
        check(job)


def test_a_node_behind_a_cut_link_is_done_without_and_comes_back(
    site: Site, tmp_path: Path
) -> None:
    with held(site, tmp_path, (0, HALF), 3) as job:
        site.nodes[1].cut()
        try:
            job.go()
            job.wait_for_step(LATER, [0, 2])
        finally:
            site.nodes[1].join()
        job.wait(timeout_s=JOB_S)
        check(job)


def test_what_a_node_keeps_wrongly_reaches_no_batch_of_any_node(site: Site, tmp_path: Path) -> None:
    with held(site, tmp_path, (0, STEPS - 1), 2) as job:
        assert spoil(tmp_path / "tiers" / "n1") > 0
        job.go()
        job.wait(timeout_s=JOB_S)
        check(job)
