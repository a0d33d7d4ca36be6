"""Who takes part: nodes, ranks, and which of them this process is.

A world is an argument. `World.from_env()` reads what torchrun, Ray Train, Slurm or MPI left in the
environment, when it is called and never before; nothing here starts or joins a process group.
Launchers say different things. torchrun and Slurm give the number of this node and of all nodes, so
nodes may have different numbers of ranks; with the others both are derived from the ranks of this
node. Values that contradict each other are not used: ranks are then spread evenly over nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.arguments import count_of
from penstock.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class _LauncherVariables:
    """The variables in which a launcher says who a process is; the first that is set counts."""

    rank: str
    num_ranks: str
    local_rank: str
    num_local_ranks: tuple[str, ...]
    node: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()


# The most specific launcher first.
_LAUNCHERS = {
    # Also Accelerate, which starts torchrun's agent, and Ray Train, which sets the same but calls
    # the node NODE_RANK and does not say how many there are.
    "torchrun": _LauncherVariables(
        rank="RANK",
        num_ranks="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        num_local_ranks=("LOCAL_WORLD_SIZE",),
        node=("GROUP_RANK", "NODE_RANK"),
        num_nodes=("GROUP_WORLD_SIZE",),
    ),
    "Open MPI": _LauncherVariables(
        rank="OMPI_COMM_WORLD_RANK",
        num_ranks="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        num_local_ranks=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Of the step, which srun sets; those of the job are there in a plain batch script as well.
    "Slurm": _LauncherVariables(
        rank="SLURM_PROCID",
        num_ranks="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        num_local_ranks=("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        node=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES",),
    ),
    "MPI": _LauncherVariables(
        rank="PMI_RANK",
        num_ranks="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        num_local_ranks=("MPI_LOCALNRANKS",),
    ),
}


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job, and which one this is.

    >>> World(rank=5, num_ranks=8, num_nodes=2)
    World(rank=5, num_ranks=8, num_nodes=2, node=1)
    >>> World(rank=5, num_ranks=8, num_nodes=2).local_rank
    1
    """

    rank: int = 0
    """This process among all; the one that feeds one model replica."""
    num_ranks: int = 1
    """All processes that share the data."""
    num_nodes: int = 1
    """Machines; ranks are numbered node by node."""
    node: int = -1
    """This machine; derived from the rank when not given."""
    local_rank: int = field(default=-1, repr=False)
    """This process among those of this machine; derived when not given."""
    num_local_ranks: int = field(default=-1, repr=False)
    """Processes on this machine that share the data; derived when not given."""
    name: str = field(default="", repr=False, compare=False)
    """Tells apart worlds of one job that look alike, as those of ranks that split a model."""

    def __post_init__(self) -> None:
        for name in ("rank", "num_ranks", "num_nodes", "node", "local_rank", "num_local_ranks"):
            object.__setattr__(self, name, count_of(name, getattr(self, name), least=-1))
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
        first, end = (-(-n * self.num_ranks // self.num_nodes) for n in (self.node, self.node + 1))
        if self.local_rank == -1:
            object.__setattr__(self, "local_rank", self.rank - first)
        if self.num_local_ranks == -1:
            object.__setattr__(self, "num_local_ranks", end - first)
        if not 0 <= self.local_rank < self.num_local_ranks <= self.num_ranks:
            raise OptionError(
                f"rank {self.rank} would be number {self.local_rank} of {self.num_local_ranks} on "
                f"node {self.node}; where nodes have different numbers of ranks, give local_rank "
                "and num_local_ranks"
            )

    @property
    def is_first_of_node(self) -> bool:
        """Whether this process does what a node does once."""
        return self.local_rank == 0

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> World:
        """Return the world that a launcher described, or a world of one.

        >>> World.from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
        World(rank=3, num_ranks=4, num_nodes=2, node=1)
        """
        env = os.environ if environment is None else environment
        for name, launcher in _LAUNCHERS.items():
            if launcher.rank in env and launcher.num_ranks in env:
                return cls._read(env, name, launcher)
        if int(env.get("WORLD_SIZE", "1") or 1) > 1:
            raise OptionError(
                f"WORLD_SIZE is {env['WORLD_SIZE']} but RANK is not set: every rank would read "
                "everything. Start with torchrun, or pass world=penstock.World(rank=…, num_ranks=…)"
            )
        return cls()

    @classmethod
    def _read(cls, env: Mapping[str, str], name: str, launcher: _LauncherVariables) -> World:
        try:
            rank, num_ranks = int(env[launcher.rank]), int(env[launcher.num_ranks])
            return _placed(env, launcher, rank, num_ranks)
        except ValueError as error:
            raise OptionError(
                f"{name} variables make no sense: {launcher.rank}={env[launcher.rank]!r}, "
                f"{launcher.num_ranks}={env[launcher.num_ranks]!r} ({error}); "
                "unset them or pass world=penstock.World(...)"
            ) from error


def _placed(
    env: Mapping[str, str], launcher: _LauncherVariables, rank: int, num_ranks: int
) -> World:
    node = _number(env, launcher.node, -1)
    num_local_ranks = _number(env, launcher.num_local_ranks, -1, node)
    local_rank = _number(env, (launcher.local_rank,), -1)
    even_nodes = -(-num_ranks // num_local_ranks) if num_local_ranks > 0 else 1
    num_nodes = _number(env, launcher.num_nodes, even_nodes)
    is_unsaid = local_rank == -1 or num_local_ranks == -1
    if not is_unsaid and not any(name in env for name in launcher.num_nodes):
        first = rank - local_rank
        ranks = (first, first + num_local_ranks, num_ranks)
        node, num_nodes = _guessed(node, even_nodes, ranks)
    # A process started by a rank may have set its own rank and inherited the other variables.
    is_whole = (
        0 <= local_rank < num_local_ranks <= num_ranks
        and local_rank <= rank
        and 0 <= node < num_nodes <= num_ranks
        and (num_nodes == 1) == (num_local_ranks == num_ranks)
    )
    if is_whole:
        return World(rank, num_ranks, num_nodes, node, local_rank, num_local_ranks)
    return World(rank, num_ranks, min(num_nodes if is_unsaid else even_nodes, num_ranks))


def _guessed(node: int, even_nodes: int, ranks: tuple[int, int, int]) -> tuple[int, int]:
    """Return the number of this node and of all nodes, as far as the ranks of this node tell."""
    first, end, num_ranks = ranks
    is_known = node != -1
    if not is_known:
        # By the first rank of the node, so that all its ranks agree even where nodes differ.
        node = max(first * even_nodes // num_ranks, int(first > 0))
    if is_known and end == num_ranks:
        return node, node + 1
    return node, max(even_nodes, node + 1 + (end < num_ranks))


def _number(env: Mapping[str, str], names: tuple[str, ...], default: int, node: int = -1) -> int:
    """Return the first number among variables; of Slurm's "4(x2),3", that of a node."""
    for name in names:
        text = env.get(name, "")
        if text.isdecimal():
            return int(text)
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(count)] * min(int(times or 1), node + 1)
        if 0 <= node < len(counts):
            return counts[node]
    return default
