"""Small jobs on the site of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cluster_job import Job, Task
from benchmarks.cluster_site import Site
from testkit.network import Host
from testkit.network_job import Launch

NUM_SAMPLES = 200
SAMPLE_BYTES = 120_000
"""Large enough that what lies between samples of a tar is under one percent."""
BATCH = 8
STEPS = NUM_SAMPLES // BATCH
HALF = STEPS // 2
"""In the middle of an epoch."""
BY_HAND = Launch(by="hand")
JOB_S = 60.0
"""A job that takes longer hangs."""


def task_of(
    site: Site, folder: Path, *, options: dict[str, Any] | None = None, **more: Any
) -> Task:
    """Return a job of two epochs whose nodes meet in a folder; each could hold the whole set."""
    wanted: dict[str, Any] = {
        "endpoint": site.store.access.endpoint,
        "disk": 2 * site.size_bytes,
        "epochs": 2,
        # A loop that waits for every batch would have whatever is late asked for twice.
        "step_s": 0.02,
    }
    return Task(
        uri=site.uri,
        folder=str(folder),
        global_batch_size=BATCH,
        threads=1,
        # A window much smaller than an epoch: most of it is still to come when a node is lost.
        look_ahead="2MB",
        options={"peers": str(folder / "meet"), **(options or {})},
        **wanted | more,
    )


def run(task: Task, hosts: list[Host], launch: Launch = BY_HAND) -> list[dict[str, Any]]:
    """Run a job to its end, and return what its ranks said then."""
    with Job(task, hosts, launch) as job:
        job.wait(timeout_s=JOB_S)
    ends = job.ends()
    assert len(ends) == len(hosts) * launch.ranks_per_host
    assert not [end for end in ends if end["num_wrong"]]
    return ends
