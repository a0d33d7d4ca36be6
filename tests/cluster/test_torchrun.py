from __future__ import annotations

from pathlib import Path

from benchmarks.cluster_job import Job, delivered, expected, peer_bytes
from benchmarks.cluster_site import Site
from testkit.network_job import Launch
from tests.cluster.small import HALF, JOB_S, NUM_SAMPLES, task_of


def test_an_elastic_restart_on_fewer_nodes_goes_on_with_the_same_global_batches(
    site: Site, tmp_path: Path
) -> None:
    task = task_of(site, tmp_path, is_lockstep=True, step_s=0.05, options={"peers": True})
    launch = Launch(by="torchrun", hosts_min=1, restarts=3)
    with Job(task, site.nodes[:2], launch) as job:
        job.wait_for_step(HALF, range(2))
        site.nodes[1].kill()
        job.wait(timeout_s=JOB_S, hosts=site.nodes[:1])
    assert delivered(tmp_path) == expected(NUM_SAMPLES, task)
    assert peer_bytes(job.ends(1)) == 0
