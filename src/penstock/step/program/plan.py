"""Plans: a program as tasks on lanes, ready to be carried out, simulated or drawn.

A task begins when those named in `after` are over and its *lane* has come to it: `compute`,
`io:fetch`, `io:decode` and `copy` for loads (`loads`), `io` for stores, and for communication along
an axis `net:AXIS` and, for gathers, `net:AXIS:gather`. Lanes of communication keep the order of the
plan, since all ranks must agree on it; other lanes take the first task that is ready. By default
tasks run one after the other, as in a framework; in regions that overlap they wait for values only.

Tasks name the chunks of values that they read and write, so a plan can be checked for races without
being run. All ranks have the same plan: the same tasks, in the same order, by the same digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import xxhash

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program, Region

__all__ = ["COMPUTE", "COPY", "DECODE", "FETCH", "IO", "Access", "Plan", "Task", "net_lane"]

COMPUTE = "compute"
IO = "io"
FETCH, DECODE, COPY = "io:fetch", "io:decode", "copy"


def net_lane(axes: tuple[str, ...]) -> str:
    """Return the lane of communication along some axes."""
    return "net:" + "+".join(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A value, or one chunk of it, that a task reads or writes."""

    value: str
    chunk: int | None = None
    """None: all of it."""
    state: str | None = None
    """The value whose memory it lies in, if not its own: mostly a state."""

    @property
    def memory(self) -> str:
        """The value whose memory it lies in."""
        return self.state or self.value

    def overlaps(self, other: Access) -> bool:
        """Whether both, in one region, have memory in common."""
        chunks = self.chunk, other.chunk
        return self.memory == other.memory and (None in chunks or chunks[0] == chunks[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work that one lane does in one go."""

    name: str
    lane: str
    nodes: tuple[str, ...]
    """The nodes that it carries out, in order: one, or those of a fused region."""
    kind: str
    """compute, move, store, call; load, or its stages fetch, decode and copy; fused (communication
    and computation as one), bucket (several collectives as one), ring (a product and communication,
    step by step)."""
    region: str | None = None
    """The region of which it does a chunk."""
    chunk: int | None = None
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    after: tuple[str, ...] = ()
    """Tasks of this iteration that must be over before; lanes keep their own order besides."""
    sent_bytes: int = 0
    """Payload that the busiest rank sends."""
    touched_bytes: int = 0
    """Memory that it reads and writes on one rank."""
    priority: int = 0
    """Among tasks that could go next on a lane, the smallest goes."""
    ahead: int = 0
    """+k: it begins k iterations before its own, as a load does. -k: it may end k iterations later,
    as a store does."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tasks in an order in which one after the other could be done."""

    program: Program
    tasks: tuple[Task, ...]
    shared: tuple[tuple[str, str], ...] = ()
    """Pairs of values: the first lies in the memory of the second."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for task in self.tasks:
            for name in task.after:
                if name not in seen:
                    raise ProgramError(f"task {task.name} waits for {name}, which comes later")
            if task.name in seen:
                raise ProgramError(f"there are two tasks called {task.name}")
            seen.add(task.name)

    def region_of(self, task: Task) -> Region | None:
        """Return the region of which a task does a chunk."""
        return None if task.region is None else self.program.region(task.region)

    @cached_property
    def by_name(self) -> dict[str, Task]:
        """The tasks by name."""
        return {task.name: task for task in self.tasks}

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes, in the order of their first tasks."""
        return tuple(dict.fromkeys(task.lane for task in self.tasks))

    def on(self, lane: str) -> tuple[Task, ...]:
        """Return the tasks of a lane in their order."""
        return tuple(task for task in self.tasks if task.lane == lane)

    def sent_bytes(self) -> dict[str, int]:
        """Return by lane the bytes that the busiest rank sends in an iteration."""
        out: dict[str, int] = {}
        for task in self.tasks:
            if task.sent_bytes:
                out[task.lane] = out.get(task.lane, 0) + task.sent_bytes
        return out

    @cached_property
    def digest(self) -> str:
        """A hash of everything that ranks must agree on."""
        said = [self.program.digest, *(repr(task) for task in self.tasks)]
        return xxhash.xxh3_128_hexdigest("\n".join(said).encode())
