"""Step programs: load, compute and communicate as one program, rewritten, tuned and carried out.

    import penstock.step as ps

    @ps.program
    def adam(g: ps.P["n"], w: ps.R["n"], ...):
        g = ps.all_reduce(g, "mean")
        ...

    schedule = adam.on(ps.mesh(dp=2), n=1 << 22).split("g").sink("g.gather")
    with ps.Groups(ps.mesh(dp=2)) as groups:
        step = ps.compile(schedule, groups)

The room `program` writes, rewrites and explains programs without torch; its names are exported here
as well. Everything that carries programs out needs torch and is imported at first use, and so is
`attach` for Accelerate, Hugging Face's Trainer and Lightning (`trainers`). README.md tells the life
of a step.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import ProgramError
from penstock.step.program import (
    L,
    Mesh,
    P,
    Program,
    R,
    S,
    Template,
    Type,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i32,
    i64,
    interpret,
    mesh,
    partial,
    program,
    u8,
)
from penstock.step.program.gradient import grad
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    all_to_all,
    amax,
    amin,
    broadcast,
    call,
    cast,
    dropout,
    equal,
    erf,
    exp,
    flatten,
    gelu,
    layer_norm,
    load,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    mean,
    minimum,
    norm,
    not_equal,
    recv,
    reduce,
    reduce_scatter,
    relu,
    rsqrt,
    send,
    sigmoid,
    sign,
    silu,
    slice,
    softmax,
    sqrt,
    store,
    sum,
    tanh,
    transpose,
    unflatten,
    update,
    where,
)
from penstock.step.program.mistakes import instead_of
from penstock.step.program.schedule import apply, read_schedule, schedule_text

if TYPE_CHECKING:
    from penstock.step.attached.attach import Attached, attach
    from penstock.step.attached.optimizers import LAMB
    from penstock.step.captured.capture import Captured, capture
    from penstock.step.dtensor import as_dtensor, placements_of
    from penstock.step.execute import Step, compile
    from penstock.step.groups import Groups
    from penstock.step.loads.shared_wire import Wire
    from penstock.step.trainers.accelerate import AttachAccelerator
    from penstock.step.trainers.huggingface import AttachMixin
    from penstock.step.trainers.lightning import AttachStrategy
    from penstock.step.tuner.calibrate import calibrate
    from penstock.step.tuner.tune import Tuned, tune

_CARRIED = {
    "Step": "execute",
    "compile": "execute",
    "Groups": "groups",
    "AttachAccelerator": "trainers.accelerate",
    "AttachMixin": "trainers.huggingface",
    "AttachStrategy": "trainers.lightning",
    "Attached": "attached.attach",
    "LAMB": "attached.optimizers",
    "as_dtensor": "dtensor",
    "attach": "attached.attach",
    "Captured": "captured.capture",
    "calibrate": "tuner.calibrate",
    "capture": "captured.capture",
    "placements_of": "dtensor",
    "Tuned": "tuner.tune",
    "Wire": "loads.shared_wire",
    "tune": "tuner.tune",
}
"""Names that need torch, and the modules that define them."""

__all__ = [
    "AttachAccelerator",
    "AttachMixin",
    "AttachStrategy",
    "Attached",
    "Captured",
    "Groups",
    "L",
    "LAMB",
    "Mesh",
    "P",
    "Program",
    "ProgramError",
    "R",
    "S",
    "Step",
    "Template",
    "Tuned",
    "Type",
    "Wire",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "amax",
    "amin",
    "apply",
    "as_dtensor",
    "attach",
    "bf16",
    "bool_",
    "broadcast",
    "calibrate",
    "call",
    "capture",
    "cast",
    "compile",
    "dropout",
    "equal",
    "erf",
    "exp",
    "f16",
    "f32",
    "f64",
    "flatten",
    "gelu",
    "grad",
    "i32",
    "i64",
    "interpret",
    "layer_norm",
    "load",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "mean",
    "mesh",
    "minimum",
    "norm",
    "not_equal",
    "partial",
    "placements_of",
    "program",
    "read_schedule",
    "recv",
    "reduce",
    "reduce_scatter",
    "relu",
    "rsqrt",
    "schedule_text",
    "send",
    "sigmoid",
    "sign",
    "silu",
    "slice",
    "softmax",
    "sqrt",
    "store",
    "sum",
    "tanh",
    "transpose",
    "tune",
    "u8",
    "unflatten",
    "update",
    "where",
]


def __getattr__(name: str) -> Any:
    found = _CARRIED.get(name)
    if found is None:
        way = "" if name.startswith("_") else f": {instead_of(name)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way}")
    return getattr(import_module(f"{__name__}.{found}"), name)
