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


def test_the_first_rank_of_each_node_is_known() -> None:
    worlds = [World(rank=r, num_ranks=5, num_nodes=2) for r in range(5)]
    assert [(w.node, w.local_rank, w.num_local_ranks) for w in worlds] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert [w.rank for w in worlds if w.is_first_of_node] == [0, 3]
    with pytest.raises(OptionError, match="give local_rank"):
        World(rank=4, num_ranks=5, num_nodes=2, node=0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "NODE_RANK": "7"},
            (3, 4, 2, 1, 0, 1),
            id="torchrun with 3 ranks on one node and 1 on the other",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"NODE_RANK": "1"},
            (3, 4, 2, 1, 1, 2),
            id="Ray Train",
        ),
        pytest.param(
            {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"NODE_RANK": "1"},
            (2, 3, 2, 1, 0, 1),
            id="Ray Train with 2 ranks on one node and 1 on the other",
        ),
        pytest.param(
            {"SLURM_PROCID": "8", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "0"}
            | {"SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": "3"}
            | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS_PER_NODE": "4"},
            (8, 11, 3, 2, 0, 3),
            id="Slurm with 4, 4 and 3",
        ),
        pytest.param(
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
            | {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            (1, 4, 2, 1, 0, 2),
            id="Slurm, ranks dealt out over the nodes in turn",
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            (2, 4, 2, 0, 2, 3),
            id="Open MPI with 3 ranks here and 1 elsewhere",
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            (2, 4, 3, 1, 1, 2),
            id="Open MPI with 2 ranks here, 1 before and 1 after",
        ),
        pytest.param(
            {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (5, 6, 3, 2, 1, 2),
            id="Hydra",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
            | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            (0, 1, 1, 0, 0, 1),
            id="one process that a rank of another job started",
        ),
    ],
)
def test_nodes_are_taken_as_launchers_say_them(
    environment: dict[str, str], expected: tuple[int, ...]
) -> None:
    world = World.from_env(environment)
    assert expected == (
        *(world.rank, world.num_ranks, world.num_nodes, world.node),
        *(world.local_rank, world.num_local_ranks),
    )
