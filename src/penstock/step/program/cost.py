"""Costs: how long a task takes, from a few numbers that were measured.

A move takes a latency and then its bytes at the rate of its link; computation takes the longer of
its memory traffic and its arithmetic; a function of the user takes its measured time. These are
times of a task that runs alone. Tasks that run at the same time share wires and the processor: a
task's work has the share of both that it uses at full speed, and `simulate` divides them.

The processor matters because moving bytes takes processor time: on few cores, communication slows
the computation that was to hide it.

The numbers are a value, `MachineCosts`, in and out of JSON. `step.calibrate` measures them; the
defaults are those of an ordinary machine, good for looking at a plan and for tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import ProgramError
from penstock.step.program.bytes import num_elements
from penstock.step.program.loads import source_of
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.plan import Plan, Task

__all__ = [
    "MachineCosts",
    "Link",
    "TaskWork",
    "axes_of",
    "kernel_amount",
    "kernel_name",
    "unmeasured_calls",
    "work_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The costs of moving bytes."""

    latency_s: float = 200e-6
    """Of one move, however small."""
    bytes_s: float = 1e9
    """Bytes a second that one rank sends, when nothing else uses the wire."""
    cpu_s: float = 0.3e-9
    """Processor time of one rank for each byte: sending, receiving and adding."""
    wire: str = ""
    """Links with one wire share it; by default each axis is a wire of its own."""
    is_memory: bool = False
    """Whether ranks see each other's memory. Then computation fused with moves is one pass; over
    other links the fused steps follow each other."""

    def __post_init__(self) -> None:
        # Written so that NaN is refused too: a timeline with it would not end.
        if not (0 <= self.latency_s < math.inf and self.bytes_s > 0 and self.cpu_s >= 0):
            raise ProgramError(
                f"a link of {self.bytes_s} bytes/s with a latency of {self.latency_s} s and "
                f"{self.cpu_s} s of processor a byte; rates are above 0, the others not below"
            )


_IO = Link(latency_s=100e-6, bytes_s=2e9, cpu_s=0.1e-9, wire="io")
_COPY = Link(latency_s=20e-6, bytes_s=20e9, cpu_s=0.0, wire="pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """Rates of the machine and the network, seen from one rank."""

    links: tuple[tuple[str, Link], ...] = ()
    """By axis, operation and algorithm: "dp", "dp/all_reduce", "dp/all_reduce/ring". The longest
    name that fits a move counts; "" fits all."""
    io: Link = _IO
    """For fetches and stores; its wire may be one that an axis uses too."""
    copy: Link = _COPY
    """For batches on their way to the device."""
    decode_bytes_s: float = 1e9
    """Bytes of a batch that one core decodes a second."""
    loads: tuple[tuple[str, float], ...] = ()
    """By source and stage, such as `train/decode`: measured bytes a second."""
    memory_bytes_s: float = 10e9
    """Bytes a second that a pass over tensors reads and writes."""
    flops_s: float = 100e9
    """Operations a second of matrix products."""
    ops_s: float = 20e9
    """Elementwise additions a second; other operations by their factors."""
    factors: tuple[tuple[str, float], ...] = ()
    """By operation: how many times slower it is than `OPS` says."""
    kernels: tuple[tuple[str, float], ...] = ()
    """By `kernel_name`: measured bytes (matmul: operations) a second."""
    calls: tuple[tuple[str, float], ...] = ()
    """By function of the user: seconds."""
    task_s: float = 20e-6
    """To begin any task."""
    cores: float = 1.0
    """Of one rank, for computation and communication."""
    threads: float = 1.0
    """Cores that computation can use."""
    measured: str = field(default="", compare=False)
    """Where the numbers were measured; empty: nowhere."""

    def __post_init__(self) -> None:
        rates = (self.memory_bytes_s, self.flops_s, self.ops_s, self.cores, self.threads)
        for rate in (*rates, self.decode_bytes_s, *dict(self.kernels).values()):
            if not rate > 0:
                raise ProgramError(f"costs of {rate} bytes or operations a second; above 0")
        if not 0 <= self.task_s < math.inf:
            raise ProgramError(f"costs of {self.task_s} seconds for a task; 0 or more")

    def link(self, axes: str, op: str = "", algo: str | None = None) -> Link:
        """Return the link of a move; along several axes, the slowest of theirs."""
        known = dict(self.links)
        names = (f"{axes}/{op}/{algo}", f"{axes}/{op}", axes)
        found = next((known[name] for name in names if name in known), None)
        if found is None and "+" in axes:
            each = [self.link(axis, op, algo) for axis in axes.split("+")]
            return max(each, key=lambda link: 1.0 / link.bytes_s)
        found = found or known.get("", Link())
        return replace(found, wire=found.wire or axes)

    def with_calls(self, measured_s: Mapping[str, float]) -> MachineCosts:
        """Return the same costs with measured times of functions."""
        return replace(self, calls=tuple(sorted({**dict(self.calls), **measured_s}.items())))

    def with_kernels(self, rates: Mapping[str, float]) -> MachineCosts:
        """Return the same costs with measured rates of kernels."""
        return replace(self, kernels=tuple(sorted({**dict(self.kernels), **rates}.items())))

    def to_json(self) -> str:
        """Return them as text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> MachineCosts:
        """Return them from text."""
        try:
            said: dict[str, Any] = json.loads(text)
            links = tuple((name, Link(**link)) for name, link in said.pop("links", ()))
            said |= {k: Link(**said[k]) for k in ("io", "copy") if k in said}
            pairs = ("factors", "kernels", "calls", "loads")
            said |= {k: tuple((n, float(x)) for n, x in said.get(k, ())) for k in pairs}
            return cls(links=links, **said)
        except (ValueError, TypeError, AttributeError) as error:
            raise ProgramError(f"these are not costs: {error}; calibrate again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """The duration of a task, and its use of shared resources."""

    latency_s: float
    """At the beginning; no shared resource is used meanwhile."""
    seconds: float
    """After the latency, when it runs alone."""
    cores: float
    """Used after the latency."""
    wire: str = ""
    wire_share: float = 0.0
    """Share of the wire that is used after the latency."""
    sent_bytes: int = 0

    @property
    def alone_s(self) -> float:
        """How long it takes when nothing else runs."""
        return self.latency_s + self.seconds


def work_of(task: Task, plan: Plan, costs: MachineCosts) -> TaskWork:
    """Return the work of a task."""
    if task.kind in ("load", "store", "fetch", "decode", "copy"):
        return _loaded(task, plan, costs)
    compute_s = _compute_s(task, plan, costs)
    moves = [plan.program[name] for name in task.nodes if is_move(plan.program[name].op)]
    if not moves:
        threads = min(costs.threads, costs.cores)
        return TaskWork(latency_s=costs.task_s, seconds=compute_s, cores=threads)
    links = [costs.link(axes_of(node), node.op, node.attr("algo")) for node in moves]
    slowest = min(links, key=lambda link: link.bytes_s)
    latency_s = sum(link.latency_s for link in links)
    if task.kind == "ring":
        # One exchange with each other rank, each during the product of the one before.
        latency_s *= plan.program.mesh.size(*moves[0].axes) - 1
    elif slowest.is_memory or task.kind == "bucket":
        latency_s = max(link.latency_s for link in links)
    is_one = slowest.is_memory or task.kind == "ring"
    link = replace(slowest, latency_s=latency_s, is_memory=is_one)
    return _moved(task, link, task.sent_bytes, compute_s, costs)


def _loaded(task: Task, plan: Plan, costs: MachineCosts) -> TaskWork:
    """Return the work of a load's stage, or of a store."""
    source = source_of(plan.program[task.nodes[0]]) if task.nodes else ""
    known = dict(costs.loads).get(f"{source}/{task.kind}")
    if task.kind == "decode":
        seconds = task.touched_bytes / (known or costs.decode_bytes_s)
        return TaskWork(latency_s=costs.task_s, seconds=seconds, cores=min(1.0, costs.cores))
    link = costs.copy if task.kind == "copy" else costs.io
    if known:
        link = replace(link, bytes_s=known)
    return _moved(task, link, max(1, task.touched_bytes), 0.0, costs)


def axes_of(node: Node) -> str:
    """Return the axes of a move as one name."""
    return "+".join(node.axes)


def _moved(
    task: Task, link: Link, size_bytes: int, compute_s: float, costs: MachineCosts
) -> TaskWork:
    """Return the work of bytes on a link and of the computation that one thread does meanwhile."""
    wire_s = size_bytes / link.bytes_s
    moving_s = max(wire_s, size_bytes * link.cpu_s)
    cpu_s = size_bytes * link.cpu_s + compute_s
    seconds = max(wire_s, cpu_s) if link.is_memory else moving_s + compute_s
    return TaskWork(
        latency_s=costs.task_s + link.latency_s,
        seconds=seconds,
        cores=cpu_s / seconds if seconds else 0.0,
        wire=link.wire,
        wire_share=wire_s / seconds if seconds else 0.0,
        sent_bytes=size_bytes,
    )


# -- computation -------------------------------------------------------------------------------


def kernel_name(nodes: Iterable[Node], program: Program) -> str:
    """Return a name by which rates are kept: the operations, and for matmul its lengths."""
    names = []
    for node in nodes:
        if node.op == "matmul":
            rows, columns = node.type.local_shape(program.mesh, 0)[-2:]
            inner = program[node.inputs[0]].type.local_shape(program.mesh, 0)[-1]
            names.append(f"matmul {rows}x{inner}x{columns}")
        elif not is_move(node.op):
            names.append(node.op)
    return "+".join(names)


def kernel_amount(task: Task, plan: Plan) -> float:
    """Return the amount that a kernel's rate counts: operations of its products, or else bytes."""
    nodes = [plan.program[name] for name in task.nodes]
    flops = sum(_product_flops(node, task, plan) for node in nodes if node.op == "matmul")
    return flops or float(task.touched_bytes)


def _compute_s(task: Task, plan: Plan, costs: MachineCosts) -> float:
    program = plan.program
    nodes = [program[name] for name in task.nodes]
    if task.kind == "call":
        region = plan.region_of(task)
        chunks = 1 if region is None else region.num_chunks
        return sum(_call_s(node, task, costs, chunks) for node in nodes if node.op == "call")
    work = [node for node in nodes if OPS[node.op].kind in ("pointwise", "reduce", "matmul")]
    if not work and task.kind in ("move", "fused"):
        return 0.0
    # A bucket computes nothing, but its values are copied together: a pass over memory, as below.
    known = dict(costs.kernels).get(kernel_name(nodes, program))
    products = [_product_flops(node, task, plan) for node in work if node.op == "matmul"]
    rest_ops = sum(_ops(node, task, plan, costs) for node in work if node.op != "matmul")
    if known is not None:
        return kernel_amount(task, plan) / known
    memory_s = task.touched_bytes / costs.memory_bytes_s
    return max(memory_s, sum(products) / costs.flops_s + rest_ops / costs.ops_s)


def _elements(name: str, task: Task, plan: Plan) -> int:
    return num_elements(name, plan.program, 0, task.chunk, plan.region_of(task))


def _product_flops(node: Node, task: Task, plan: Plan) -> float:
    inner = plan.program[node.inputs[0]].type.local_shape(plan.program.mesh, 0)[-1]
    return 2.0 * inner * _elements(node.name, task, plan)


def _ops(node: Node, task: Task, plan: Plan, costs: MachineCosts) -> float:
    elements = max(_elements(name, task, plan) for name in (node.name, *node.inputs))
    factor = dict(costs.factors).get(node.op, 1.0)
    return elements * OPS[node.op].cost * factor


def _call_s(node: Node, task: Task, costs: MachineCosts, chunks: int) -> float:
    known = dict(costs.calls).get(str(node.attr("function")), node.attr("cost_s"))
    if known is not None and math.isfinite(float(known)):
        return float(known) / chunks
    return task.touched_bytes / costs.memory_bytes_s


def unmeasured_calls(program: Program, costs: MachineCosts) -> tuple[str, ...]:
    """Return the functions without a known time, which count as one pass over memory."""
    calls = [node for node in program.nodes if node.op == "call" and node.attr("cost_s") is None]
    names = dict.fromkeys(str(node.attr("function")) for node in calls)
    return tuple(name for name in names if name not in dict(costs.calls))
