"""Hooks for communication between ranks.

Collectives that the job calls and waits for are recorded as they are called. torch's
DistributedDataParallel communicates inside the backward pass, in native code; it measures itself,
and its own figures say how much communication no computing hid: that is what the step waits for.
On a GPU, collectives are only put on a stream: the host's time says little there.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

from penstock.trace.foreign.process import recorder, safely
from penstock.trace.schema import Kind

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "barrier", "all_gather_object", "broadcast_object_list", "gather_object",
)  # fmt: skip

_backward_ended_ns = 0


class _Inside(threading.local):
    """Whether this thread is in a collective that is recorded."""

    is_inside = False


_INSIDE = _Inside()


def hook_collectives(module: Any) -> None:
    """Record collectives that the job calls and waits for."""
    for name in _COLLECTIVES:
        if hasattr(module, name):
            setattr(module, name, _timed(getattr(module, name), name))


def _timed(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def collective(*arguments: Any, **options: Any) -> Any:
        if _INSIDE.is_inside:  # Those of objects are made of others.
            return original(*arguments, **options)
        start_ns = time.perf_counter_ns()
        _INSIDE.is_inside = True
        try:
            answer = original(*arguments, **options)
        finally:
            _INSIDE.is_inside = False
        if answer is None:  # With async_op there is something to wait for, and nothing was waited.
            _record(name, start_ns, time.perf_counter_ns(), arguments)
        return answer

    return collective


@safely
def _record(name: str, start_ns: int, end_ns: int, arguments: tuple[Any, ...] = ()) -> None:
    to = recorder()
    size_bytes = sum(a.nbytes for a in arguments if isinstance(getattr(a, "nbytes", None), int))
    to.span(Kind.COMMUNICATE, start_ns, end_ns, object_id=to.name(name), size_bytes=size_bytes)


def hook_backward(module: Any) -> None:
    """Note when a backward pass ends."""
    original = module.backward

    @functools.wraps(original)
    def backward(*arguments: Any, **options: Any) -> Any:
        global _backward_ended_ns
        try:
            return original(*arguments, **options)
        finally:
            _backward_ended_ns = time.perf_counter_ns()

    module.backward = backward


def hook_data_parallel(module: Any) -> None:
    """Record the communication times that DistributedDataParallel measures."""
    original = module.DistributedDataParallel.forward

    @functools.wraps(original)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        output = original(self, *arguments, **options)
        # What torch compiles must not meet our own work: it would be compiled in other parts.
        if not sys.modules["torch"].compiler.is_compiling():
            _record_exposed(self)
        return output

    module.DistributedDataParallel.forward = forward


@safely
def _record_exposed(model: Any) -> None:
    """Record the communication of the latest backward pass that no computing hid.

    The figures are those of the step before: the model computes them when a forward pass begins.
    On the CPU they are a few clock readings, so they are asked for at every step; on a GPU the
    model's own rhythm is kept (every 100 steps), since reading its events makes the host wait.
    """
    state = model.__dict__
    if "_penstock_ended_ns" not in state:
        state["_penstock_ended_ns"] = _backward_ended_ns
        if model.device_type == "cpu":
            model._set_ddp_runtime_logging_sample_rate(1)
        return
    if not _backward_ended_ns or state["_penstock_ended_ns"] == _backward_ended_ns:
        return  # Evaluation: no backward pass since.
    state["_penstock_ended_ns"] = _backward_ended_ns
    told = model._get_ddp_logging_data()
    figures = tuple(
        int(told.get(name, 0))
        for name in ("backward_comm_time", "backward_compute_comm_overlap_time")
    )
    if figures == state.get("_penstock_figures") or figures[0] <= 0:
        return  # Not measured at this step.
    state["_penstock_figures"] = figures
    exposed_ns = max(0, figures[0] - figures[1])
    _record("ddp gradients", _backward_ended_ns - exposed_ns, _backward_ended_ns)
