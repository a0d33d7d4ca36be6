"""A kernel as a function of torch: plain operations on whole tensors, one after the other.

This is the reference for every other backend, and the function that `torch.compile` compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ProgramError
from penstock.step.dtypes import COMPUTED, torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.draws import dropped
from penstock.step.kernels.names import Names, code_of
from penstock.step.kernels.stages import Stage
from penstock.step.program.nodes import Node

__all__ = ["expression_functions", "function_of", "operand_text", "root", "text_of", "together"]

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
_INFIX |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_PLAIN = ("rsqrt", "exp", "log", "tanh", "sigmoid", "relu", "erf", "sign", "abs", "neg", "where")
_CALLED = {op: f"torch.{op}" for op in _PLAIN}
_CALLED |= {op: f"torch.logical_{op}" for op in ("not", "and", "or")}
_CALLED |= {op: f"torch.nn.functional.{op}" for op in ("gelu", "silu")}
_CALLED["sqrt"] = "root"
_REDUCED = {"sum": "sum", "max": "amax", "min": "amin"}

Numbers = Callable[[Tensor], Tensor]


def together(addends: Sequence[Tensor] | Tensor, op: str) -> Tensor:
    """Return the reduction over ranks, in their order; narrow floats are widened first."""
    several = [addends] if isinstance(addends, Tensor) else addends
    narrow = (torch.bfloat16, torch.float16)
    wide = [one.float() if one.dtype in narrow else one for one in several]
    out = wide[0]
    for one in wide[1:]:
        if op == "max":
            out = torch.maximum(out, one)
        elif op == "min":
            out = torch.minimum(out, one)
        else:
            out = out + one
    return out / len(wide) if op == "mean" and len(wide) > 1 else out


def root(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the square root of each element, rounded by IEEE rules as in all backends.

    On CPUs torch passes whole tensors to a library whose last bit sometimes differs. Ranks that
    hold the same value must not drift apart because their backends differ.
    """
    is_plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not is_plain or torch.compiler.is_compiling():
        return torch.sqrt(x) if out is None else torch.sqrt(x, out=out)
    with np.errstate(invalid="ignore"):
        if out is None:
            # NumPy turns an array without dimensions into a scalar.
            return torch.as_tensor(np.sqrt(x.detach().numpy()))
        np.sqrt(x.numpy(), out=out.numpy())
    return out


def text_of(body: KernelBody) -> str:
    """Return a body as the text of a function `kernel(inputs, scalars, numbers)`.

    It returns the results, in the element types of the program. `numbers(x)` are the positions of
    the elements of x in the whole value, which dropout needs.
    """
    names = Names()
    lines = [f"def kernel(inputs, scalars, numbers):  # {body.name}"]
    given = [names(name) for name in body.inputs]
    lines += [f"{', '.join(given)}, = inputs"] if given else []
    numbers = [names(name) for name in body.numbers]
    lines += [f"{', '.join(numbers)}, = scalars"] if numbers else []
    addends = dict(body.addends)
    for name in body.inputs:
        x = names(name)
        if name in addends:
            lines.append(f"{x} = together({x}, {addends[name]!r})")
        elif body.types[name].dtype in COMPUTED:
            lines.append(f"{x} = {x}.float()")
    lines += [f"{names(node.name)} = {_expression(node, body, names)}" for node in body.nodes]
    left = [_leaving(name, value, body, names) for name, value in body.stores]
    lines.append(f"return [{', '.join(left)}]")
    return "\n    ".join(lines) + "\n"


def function_of(body: KernelBody) -> Callable[[Any, Any, Numbers], list[Any]]:
    """Return a body as a function of torch."""
    space = code_of(
        text_of(body), body.name, torch=torch, together=together, dropped=dropped, root=root
    )
    found: Callable[[Any, Any, Numbers], list[Any]] = space["kernel"]
    return found


def expression_functions(
    body: KernelBody, stages: Sequence[Stage]
) -> dict[str, Callable[..., Tensor]]:
    """Return the operations on single values, by node, as functions of their operands."""
    return {n.name: _expression_function(n, body) for stage in stages for n in stage.ones}


def _expression_function(node: Node, body: KernelBody) -> Callable[..., Tensor]:
    names = Names()
    args = [names(name) for name in dict.fromkeys(node.inputs)]
    made = _expression(node, body, names)
    text = f"def kernel({', '.join(args)}):\n    return {made}\n"
    found = code_of(text, f"{body.name} {node.name}", torch=torch, root=root)["kernel"]
    return lambda *values: found(**dict(zip([names(n) for n in node.inputs], values, strict=True)))


def _expression(node: Node, body: KernelBody, names: Names) -> str:
    args = [operand_text(name, body, names) for name in node.inputs]
    is_host = [name in body.host_names for name in node.inputs]
    op = node.op
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _CALLED:
        return f"{_CALLED[op]}({', '.join(args)})"
    if op in ("maximum", "minimum"):
        return _extreme(op, args, is_host)
    if op in _REDUCED:
        how = f"dim={tuple(node.attr('dims'))}, keepdim={bool(node.attr('keep'))}"
        return f"torch.{_REDUCED[op]}({args[0]}, {how})"
    return _special(node, args, body, names)


def _extreme(op: str, args: list[str], is_host: list[bool]) -> str:
    if any(is_host):
        number, other = args if is_host[0] else args[::-1]
        # The maximum of x and a number is x clamped from below. The number may be a tensor without
        # dimensions, which `clamp` accepts as well.
        side = "min" if op == "maximum" else "max"
        return f"torch.clamp({other}, {side}={number})"
    return f"torch.{op}({', '.join(args)})"


def _special(node: Node, args: list[str], body: KernelBody, names: Names) -> str:
    op = node.op
    if op == "cast":
        return f"{args[0]}.to({torch_dtype(body.dtype(node.name))})"
    if op == "softmax":
        return f"torch.softmax({args[0]}, dim={node.attr('dim')})"
    if op == "dropout":
        seed = node.inputs[1]
        if seed not in body.host_names:
            raise ProgramError(f"{node.name}: a seed is a scalar of the program, got {seed}")
        low, high = names(f"{seed} low"), names(f"{seed} high")
        return f"dropped({args[0]}, {low}, {high}, {node.attr('share')!r}, numbers)"
    if op == "transpose":
        return f"{args[0]}.permute({tuple(node.attr('dims'))})"
    if op == "matmul":
        return f"{args[0]} @ {args[1]}"
    if op == "flatten":
        dim = int(node.attr("dim"))
        return f"{args[0]}.flatten({dim}, {dim + int(node.attr('count')) - 1})"
    if op == "unflatten":
        lengths = tuple(node.attr("lengths"))
        # Of a slice, this rank has a part of the first new dimension.
        return f"{args[0]}.unflatten({node.attr('dim')}, {(-1, *lengths[1:])})"
    raise ProgramError(f"{op} ({node.name}) cannot be part of a kernel; leave it out")


def operand_text(name: str, body: KernelBody, names: Names) -> str:
    """Return the name of a value in the text, or a constant as a literal."""
    if name not in body.consts:
        return names(name)
    value = repr(body.consts[name])
    return value if value not in ("inf", "-inf", "nan") else f"float({value!r})"


def _leaving(name: str, value: str, body: KernelBody, names: Names) -> str:
    made = body.types[name]
    if body.reach.get(value) == "host" or value in body.host_names:
        return (
            f"torch.as_tensor({operand_text(value, body, names)}, dtype={torch_dtype(made.dtype)})"
        )
    # An input may have the memory of another output, for instance when two states are exchanged.
    copied = ", copy=True" if value in body.inputs else ""
    return f"{names(value)}.to({torch_dtype(made.dtype)}{copied})"
