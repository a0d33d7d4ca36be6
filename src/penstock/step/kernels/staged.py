"""Carrying out a kernel pass by pass on the CPU, whatever carries out a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import KernelCall
from penstock.step.kernels.eager import expression_functions
from penstock.step.kernels.stages import Stage, stages_of

__all__ = ["StagedKernel"]


class StagedKernel(ABC):
    """A flat or row-wise body. Single values between passes are computed by torch."""

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._stages = stages_of(body)
        self._ones = expression_functions(body, self._stages)

    def __call__(self, call: KernelCall) -> None:
        """Write the results into their tensors."""
        body = self._body
        for stage in self._stages:
            if stage.writes or stage.totals:
                self._prepare(stage, call)
        values: dict[str, Any] = dict(call.inputs)
        ones: dict[str, Tensor] = {}
        for stage in self._stages:
            for node in stage.ones:
                known = call.numbers | values | ones
                made = self._ones[node.name](*(known[name] for name in node.inputs))
                ones[node.name] = made.to(torch_dtype(body.dtype(node.name)))
            if stage.writes or stage.totals:
                self._run(stage, call, values, ones)
            for name, value in stage.stores:
                out = call.outs[name]
                if body.reach[value] == "one":
                    assert isinstance(out, Tensor)
                    out.copy_(ones[value] if value in ones else values[value])
                values[name] = out

    @abstractmethod
    def _prepare(self, stage: Stage, call: KernelCall) -> None:
        """Do what may fail, such as compiling, before the first stage overwrites a state."""

    @abstractmethod
    def _run(
        self, stage: Stage, call: KernelCall, values: dict[str, Any], ones: dict[str, Tensor]
    ) -> None:
        """Run one pass; add what it keeps to `values` and its sums to `ones`."""
