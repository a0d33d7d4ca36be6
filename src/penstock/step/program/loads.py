"""Loads in stages, through which a batch goes before a step can use it, each on its own lane.

    fetch    on `io:fetch`     its bytes come from where they lie, maybe over the wire of gradients
    decode   on `io:decode`    they become samples, and samples a batch
    copy     on `copy`         the batch goes to the device

Which stages a load has depends on the source and the device, of which a program knows nothing. So
they are an attribute of the load: `step.compile` sets it from the given sources (`staged`), or the
program names it. A load without it is one task on `io:fetch`. The last stage has the name of the
load and makes its value; results of the others belong to the source. `rotate` puts all stages
equally far ahead: the batch of iteration k + 2 is fetched while that of k + 1 is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.nodes import Node, Program
from penstock.step.program.plan import COPY, DECODE, FETCH, Task

__all__ = ["LOAD_LANES", "STAGES", "source_of", "staged", "stages_of", "tasks_of_load"]

STAGES = ("fetch", "decode", "copy")
LOAD_LANES = (FETCH, DECODE, COPY)
_LANES = dict(zip(STAGES, LOAD_LANES, strict=True))


def source_of(node: Node) -> str:
    """Return the name of the source of a load: what stands before the first dot."""
    return str(node.attr("source")).partition(".")[0]


def stages_of(node: Node) -> tuple[str, ...]:
    """Return the stages of a load; nothing where it is done in one go."""
    stages: tuple[str, ...] = node.attr("stages", ())
    if list(stages) != [stage for stage in STAGES if stage in stages]:
        raise ProgramError(
            f"load {node.name} in the stages {', '.join(map(str, stages))}; there are "
            f"{', '.join(STAGES)}, in this order"
        )
    return stages


def staged(program: Program, by_source: Mapping[str, tuple[str, ...]]) -> Program:
    """Return a program whose loads have the stages that their sources offer."""
    loads = [node for node in program.nodes if node.op == "load"]
    stages = {node.name: {"stages": by_source.get(source_of(node)) or None} for node in loads}
    return program.with_attrs(stages) if loads else program


def tasks_of_load(node: Node, task: Task) -> list[Task]:
    """Return the tasks of a load, one for each stage; the last one makes the value."""
    stages = stages_of(node)
    fetched_bytes = round(task.touched_bytes * float(node.attr("stored", 1.0)))
    if not stages:
        return [replace(task, lane=FETCH, touched_bytes=fetched_bytes)]
    out = []
    for stage in stages:
        is_last = stage == stages[-1]
        out.append(
            replace(
                task,
                name=node.name if is_last else f"{node.name}.{stage}",
                lane=_LANES[stage],
                kind=stage,
                writes=task.writes if is_last else (),
                touched_bytes=fetched_bytes if stage == "fetch" else task.touched_bytes,
            )
        )
    return out
