"""Programs: what a step computes, loads and sends, as a value that can be rewritten.

Pure: no clock, no thread, no torch. A function of the user becomes a `Program` (`language`), whose
values have layouts (`layouts`, `infer`); `passes` turn it into others that mean the same;
`interpret` says what that is. Carrying a program out is `step`.

Modules import in one direction: `layouts`, `types` and `nodes` are values, `trace` and `language`
write programs, `passes` rewrite them, `lower` makes plans, `simulate` and `explain` predict.
"""

from penstock.step.program import explain, language, schedule
from penstock.step.program.interpret import interpret
from penstock.step.program.language import Template, program
from penstock.step.program.layouts import DTYPES, L, P, R, S, partial
from penstock.step.program.mesh import Mesh, mesh
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.types import Type

f64, f32, bf16, f16 = (DTYPES[name] for name in ("f64", "f32", "bf16", "f16"))
i64, i32, u8, bool_ = (DTYPES[name] for name in ("i64", "i32", "u8", "bool"))

__all__ = [
    "L",
    "Mesh",
    "Node",
    "P",
    "Program",
    "R",
    "Region",
    "S",
    "Template",
    "Type",
    "bf16",
    "bool_",
    "explain",
    "f16",
    "f32",
    "f64",
    "i32",
    "i64",
    "interpret",
    "language",
    "mesh",
    "partial",
    "program",
    "schedule",
    "u8",
]
