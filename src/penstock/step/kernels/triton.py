"""Kernels on CUDA: the text of `triton_text`, compiled and launched.

The best size of tiles is found once for each kernel and order of size, on tensors of its own, since
a trial must not update states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ProgramError
from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import Given, KernelCall, several
from penstock.step.kernels.eager import expression_functions
from penstock.step.kernels.names import code_of
from penstock.step.kernels.stages import Stage, stages_of
from penstock.step.kernels.triton_text import KernelText, can_write, kernel_text
from penstock.step.kernels.triton_tune import Config, best_of, configs_of
from penstock.step.program.nodes import Node

__all__ = ["Launcher", "can_run"]

ROW_LENGTH_MAX = 16 * 1024
"""Longest rows that programs can hold in their registers."""


def can_run(body: KernelBody, call: KernelCall) -> bool:
    """Whether a call of a body can run as kernels for CUDA."""
    is_long = body.kind == "rows" and call.place.row_length > ROW_LENGTH_MAX
    return body.kind != "loose" and can_write(body) and not is_long


def _has_pass(stage: Stage) -> bool:
    return bool(stage.nodes or stage.totals or stage.kept or stage.loads)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One compiled pass."""

    stage: Stage
    text: KernelText
    function: Any


class Launcher:
    """A body as kernels on CUDA."""

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._stages = stages_of(body)
        self._ones = expression_functions(body, self._stages)
        self._passes: dict[Any, list[_Pass]] = {}
        self._configs: dict[Any, Config] = {}

    def __call__(self, call: KernelCall) -> None:
        """Launch the kernels that write the results."""
        if self._body.kind == "rows" and call.place.row_length > ROW_LENGTH_MAX:
            raise ProgramError(
                f"rows of {call.place.row_length} elements; programs on CUDA hold at most "
                f"{ROW_LENGTH_MAX}; use another backend"
            )
        values: dict[str, Given] = dict(call.inputs)
        ones: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for one in self._passes_of(call):
            if _has_pass(one.stage):
                self._start(one, call, values, parts)
            self._leave(one.stage, call, values, ones, parts)

    def _passes_of(self, call: KernelCall) -> list[_Pass]:
        widths = call.widths
        key = tuple(sorted(widths.items()))
        if key not in self._passes:
            self._passes[key] = [self._pass(stage, widths) for stage in self._stages]
        return self._passes[key]

    def _pass(self, stage: Stage, widths: dict[str, int]) -> _Pass:
        text = kernel_text(self._body, stage, widths)
        function = code_of(text.text, text.name)[text.name] if _has_pass(stage) else None
        return _Pass(stage=stage, text=text, function=function)

    # -- one pass ------------------------------------------------------------------------------

    def _start(
        self, one: _Pass, call: KernelCall, values: dict[str, Given], parts: dict[str, Tensor]
    ) -> None:
        body, text = self._body, one.text
        for value in one.stage.kept:
            dtype = torch_dtype(body.dtype(value))
            values[f"kept {value}"] = torch.empty(call.place.block, dtype=dtype, device=call.device)
        loads = [values[name] for name in text.loads]
        stores = [values[n] if n.startswith("kept ") else call.outs[n] for n in text.stores]
        key = one.stage.index, call.place.row_length, _num_elements(call).bit_length()
        numbers = [_number(name, one, body, call) for name in text.numbers]
        launch = _Launch(
            one=one, call=call, loads=loads, stores=stores, parts=parts, numbers=numbers
        )
        config = self._configs.get(key)
        if config is None:
            choices = configs_of(body.kind, call.place.row_length, _width(loads + stores))
            config = self._configs[key] = best_of(choices, lambda c: _trial(launch, c))
        launch.go(config)
        for value in one.stage.kept:
            values[value] = values.pop(f"kept {value}")

    def _leave(
        self,
        stage: Stage,
        call: KernelCall,
        values: dict[str, Given],
        ones: dict[str, Tensor],
        parts: dict[str, Tensor],
    ) -> None:
        """Compute single values that are results, and note what was stored."""
        leaving = {value for _, value in stage.stores if self._body.reach[value] == "one"}
        for name in leaving & parts.keys():
            ones[name] = _merged(self._body.by_name[name], parts[name])
        if leaving - parts.keys():
            for node in stage.ones:
                args = [self._one(name, call, values, ones, parts) for name in node.inputs]
                ones[node.name] = self._ones[node.name](*args)
        for name, value in stage.stores:
            out = call.outs[name]
            if value in leaving:
                assert isinstance(out, Tensor)
                out.copy_(ones[value] if value in ones else values[value])  # type: ignore[arg-type]
            values[name] = out

    def _one(
        self,
        name: str,
        call: KernelCall,
        values: dict[str, Given],
        ones: dict[str, Tensor],
        parts: dict[str, Tensor],
    ) -> Any:
        if name in self._body.host_names:
            return call.numbers[name]
        if name in parts and name not in ones:
            ones[name] = _merged(self._body.by_name[name], parts[name])
        return ones[name] if name in ones else values[name]


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """One launch of a kernel."""

    one: _Pass
    call: KernelCall
    loads: list[Given]
    stores: list[Given]
    parts: dict[str, Tensor]
    """Partial sums, of earlier passes and of this one."""
    numbers: list[float]

    def go(self, config: Config) -> None:
        text, call = self.one.text, self.call
        length = _num_elements(call)
        num_programs = config.num_programs(length, call.place.row_length, bool(text.totals))
        made = {
            name: torch.empty(num_programs, dtype=torch.float32, device=call.device)
            for name in text.totals
        }
        args: list[Any] = [*_flat(self.loads), *_flat(self.stores), *made.values()]
        given = [self.parts[name] for name in text.given]
        args += [*given, *self.numbers, *config.lengths(length, call.place.row_length)]
        args += [given[0].numel()] if given else []
        named: dict[str, Any] = dict(config.sizes)
        if text.has_place:
            place = call.place
            args += [place.first_row, place.first_column, place.row_length]
            args += [place.whole_row_length]
            named["IS_RUN"] = place.is_run
        if given:
            named["PARTS"] = _power_of_two(given[0].numel())
        if num_programs:
            named |= {"num_warps": config.num_warps, "enable_fp_fusion": text.is_rows}
            with torch.cuda.device(call.device):
                self.one.function[(num_programs,)](*args, **named)
        self.parts.update(made)


def _trial(launch: _Launch, config: Config) -> Callable[[], None] | None:
    """Return a launch of the same kernel on other memory; None if the block is too small to try."""
    limit = config.trial_elements(_num_elements(launch.call), launch.call.place.row_length)
    if not limit:
        return None
    place = launch.call.place
    rows = max(1, limit // place.row_length)
    shape = (rows, place.row_length) if len(place.block) > 1 else (limit,)
    block = replace(place, block=shape, starts=(0,) * len(shape), whole=shape)
    call = replace(launch.call, place=block, copied=())

    def cut(given: Given) -> Given:
        heads = [one.reshape(-1)[:limit].clone() for one in several(given)]
        return heads[0] if isinstance(given, Tensor) else heads

    other = replace(
        launch,
        call=call,
        loads=[cut(one) for one in launch.loads],
        stores=[cut(one) for one in launch.stores],
        parts=dict(launch.parts),
    )
    return lambda: other.go(config)


def _number(name: str, one: _Pass, body: KernelBody, call: KernelCall) -> float:
    found = call.numbers[name]
    if name.endswith((" low", " high")):
        # Halves of seeds have 32 bits, passed as signed numbers.
        return found - (1 << 32) if found >= 1 << 31 else found
    readers = [n for n in (*one.stage.nodes, *one.stage.ones) if name in n.inputs]
    whole = readers and all(body.dtype(n.name) in ("i64", "i32", "u8") for n in readers)
    return int(found) if whole else float(found)


def _merged(node: Node, parts: Tensor) -> Tensor:
    if node.op == "sum":
        return parts.sum(dtype=torch.float64).float()
    return torch.amax(parts) if node.op == "max" else torch.amin(parts)


def _flat(given: Sequence[Given]) -> list[Tensor]:
    return [tensor for one in given for tensor in several(one)]


def _width(given: Sequence[Given]) -> int:
    return max((len(several(one)) for one in given), default=1)


def _num_elements(call: KernelCall) -> int:
    return math.prod(call.place.block)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
