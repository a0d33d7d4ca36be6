"""Who takes part: nodes, ranks, and which of them this process is.

A world is an argument. `World.from_env()` reads what torchrun, Slurm or MPI left in the
environment, when it is called and never before; nothing here starts or joins a process group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import OptionError

# (rank, number of ranks, rank inside the node, ranks inside the node), most specific launcher
# first.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Of the step, which srun sets; those of the job are there in a plain batch script as well.
    "Slurm": (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job, and which one this is.

    >>> World(rank=5, num_ranks=8, num_nodes=2)
    World(rank=5, num_ranks=8, num_nodes=2, node=1)
    """

    rank: int = 0
    """This process among all; the one that feeds one model replica."""
    num_ranks: int = 1
    """All processes that share the data."""
    num_nodes: int = 1
    """Machines; ranks are numbered node by node."""
    node: int = -1
    """This machine; derived from the rank when not given."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise OptionError(
                f"rank {self.rank} of {self.num_ranks}: ranks run from 0 to num_ranks - 1"
            )
        if not 1 <= self.num_nodes <= self.num_ranks:
            raise OptionError(f"{self.num_nodes} nodes for {self.num_ranks} ranks: give 1 or more")
        if self.node == -1:
            object.__setattr__(self, "node", self.rank * self.num_nodes // self.num_ranks)
        if not 0 <= self.node < self.num_nodes:
            raise OptionError(f"node {self.node} of {self.num_nodes}: nodes are numbered from 0")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> World:
        """Return the world that a launcher described, or a world of one.

        >>> World.from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
        World(rank=3, num_ranks=4, num_nodes=2, node=1)
        """
        env = os.environ if environment is None else environment
        for launcher, (rank, num_ranks, _, local_size) in _LAUNCHERS.items():
            if rank in env and num_ranks in env:
                return cls._read(env, launcher, rank, num_ranks, local_size)
        if int(env.get("WORLD_SIZE", "1") or 1) > 1:
            raise OptionError(
                f"WORLD_SIZE is {env['WORLD_SIZE']} but RANK is not set: every rank would read "
                "everything. Start with torchrun, or pass world=penstock.World(rank=…, num_ranks=…)"
            )
        return cls()

    @classmethod
    def _read(
        cls, env: Mapping[str, str], launcher: str, rank: str, num_ranks: str, local_size: str
    ) -> World:
        try:
            all_ranks = int(env[num_ranks])
            # Slurm may write "4(x2),3": only a plain number says how many ranks each node has.
            per_node = env.get(local_size, "")
            nodes = -(-all_ranks // int(per_node)) if per_node.isdigit() else 1
            if launcher == "Slurm":
                nodes = int(env.get("SLURM_STEP_NUM_NODES", nodes))
            return cls(rank=int(env[rank]), num_ranks=all_ranks, num_nodes=nodes)
        except ValueError as error:
            raise OptionError(
                f"{launcher} variables make no sense: {rank}={env[rank]!r}, "
                f"{num_ranks}={env[num_ranks]!r} ({error}); "
                "unset them or pass world=penstock.World(...)"
            ) from error
