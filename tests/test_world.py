"""Who takes part, as launchers say it."""

import pytest

from penstock.errors import OptionError
from penstock.world import World


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            World(rank=5, num_ranks=8, num_nodes=2),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            World(rank=3, num_ranks=4, num_nodes=2),
        ),
        # A batch script that was not started by srun: one process, whatever the job was given.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, World()),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            World(rank=1, num_ranks=2),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, World()),
    ],
)
def test_a_world_is_read_from_what_launchers_leave(
    environment: dict[str, str], expected: World
) -> None:
    assert World.from_env(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_a_world_that_makes_no_sense_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        World.from_env(environment)


def test_nodes_hold_ranks_in_order() -> None:
    assert [World(rank=r, num_ranks=6, num_nodes=3).node for r in range(6)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(OptionError):
        World(rank=0, num_ranks=2, num_nodes=3)
