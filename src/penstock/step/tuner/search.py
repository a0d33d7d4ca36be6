"""Which schedules there are: rewrites tried one after the other, the promising ones kept.

A search goes through *stages*: communication is cut in halves and sunk, work is fused, moves are
put into buckets, regions are cut into chunks that overlap, orders and wires are chosen. Every stage
tries each of its *ways* on each program that was kept. Ways that a rewrite refuses are dropped,
programs that were seen before (by digest) are not tried again, and the simulator chooses the
programs that are kept for the next stage. Each stage keeps the programs it began with as well, so
no stage can make the result worse.

A way treats similar nodes alike: all large all-reduces are split, or none. That keeps the number of
programs small where a model has hundreds of tensors.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from penstock.errors import ProgramError
from penstock.step.program.bytes import sent_bytes
from penstock.step.program.cost import MachineCosts, axes_of
from penstock.step.program.lower import host_nodes, lower
from penstock.step.program.nodes import Attr, Node, Program, Rewrite
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.passes.draft import below_all
from penstock.step.program.plan import net_lane
from penstock.step.program.simulate import simulate
from penstock.step.program.verify import left_between
from penstock.step.program.ways import ALGOS, can_do

__all__ = ["ALLOWED", "Candidate", "Search", "checked", "search"]

ALLOWED = ("sliced", "bf16", "f16")
"""What a user may allow: states kept in slices, if they are not returned (they are given in slices
then), and wires of fewer bits, which change values."""
_CHUNKS = (2, 4, 8, 16, 32)
_BUCKET_BYTES = (1 << 20, 4 << 20, 25 << 20, 1 << 40)
_LARGE_BYTES = 64 << 10
"""Moves below this are left as they are."""
_CHUNK_BYTES_MIN = 32 << 10
_TASKS_MAX = 256
"""Tasks of regions in chunks: each costs time to begin, and to simulate."""
_KEPT = 10
"""Programs that go on to the next stage."""

_ALIKE_MAX = 2
"""Programs of one kind that are measured at once; one, if none of the kind was measured yet."""
_DETAILS = ("fuse", "sink", "priority_by_use", "dead")
"""Rewrites that do not change a program's kind."""
_SHAPE_MAX = 3
"""Programs with the same rewrites that go on to the next stage."""

_MODEL_SHARE = 0.06
"""The typical error of predictions: programs nearer to each other than this count as equal."""
_WAY_SHARE = 0.9
"""Another algorithm must promise at most this share of a move's time; less of a gain is noise."""
_DOUBT = 1.05
"""Programs whose expected time is beyond the best measured one by this factor are not measured."""

Way = tuple[Rewrite, ...]
"""An empty one is skipped: a stage that finds nothing to do may yield it."""
Stage = Callable[[Program], Iterator[Way]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A program that could replace the given one."""

    program: Program
    predicted_s: float

    @property
    def schedule(self) -> tuple[Rewrite, ...]:
        """The rewrites that made it."""
        return self.program.history

    @property
    def shape(self) -> tuple[str, ...]:
        """The names of its rewrites, without their arguments."""
        return tuple(rewrite.name for rewrite in self.schedule)

    @property
    def kind(self) -> frozenset[str]:
        """The rewrites that its time depends on most: one kind has one error of prediction."""
        return frozenset(self.shape) - frozenset(_DETAILS)


@dataclass(kw_only=True)
class Search:
    """The result of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    """By predicted time, the fastest first; the given program is among them."""
    num_tried: int = 0

    def next(
        self, count: int, measured_s: Mapping[str, float], *, but: Collection[str] = ()
    ) -> list[Candidate]:
        """Return some that look fast and differ: not one program in many sizes of one number.

        `measured_s` has the times measured so far by digest, that of the given program among them;
        `but` has the digests of programs that cannot be used. A prediction is corrected by the
        error that it had for the most similar schedules, so each measurement tells what to measure
        next. Among programs whose corrected predictions are equal, those with fewer rewrites go
        first: the model errs more with many. Programs that look slower than the best are left out.
        """
        known = [c for c in self.candidates if c.program.digest in measured_s]
        off = {
            c.program.digest: measured_s[c.program.digest] / max(1e-12, c.predicted_s)
            for c in known
        }
        expected = {c.program.digest: c.predicted_s * _off(c, known, off) for c in self.candidates}
        most_s = _DOUBT * min(measured_s.values(), default=0.0)
        fastest_s = max(1e-12, min(expected.values(), default=0.0))

        def place(candidate: Candidate) -> tuple[int, int, float]:
            seconds = expected[candidate.program.digest]
            band = int((seconds / fastest_s - 1.0) / _MODEL_SHARE)
            return band, len(set(candidate.shape)), seconds

        out: list[Candidate] = []
        tested = {c.kind for c in known}
        kinds: Counter[frozenset[str]] = Counter()
        for candidate in sorted(self.candidates, key=place):
            is_full = kinds[candidate.kind] >= (_ALIKE_MAX if candidate.kind in tested else 1)
            # Equal predictions are mostly equal plans, reached by other rewrites.
            is_same = any(_is_near(candidate.predicted_s, c.predicted_s, 1e-9) for c in out)
            digest = candidate.program.digest
            is_tried = digest in measured_s or digest in but
            if is_tried or is_same or is_full or expected[digest] > most_s:
                continue
            kinds[candidate.kind] += 1
            out.append(candidate)
            if len(out) == count:
                break
        return out


def _off(candidate: Candidate, known: list[Candidate], off: Mapping[str, float]) -> float:
    """Return the correction of a prediction, from those of the most similar measured schedules.

    The less similar those are, the more it goes towards the smallest correction of all: where
    nothing is known, the search is optimistic.
    """
    if not known:
        return 1.0
    far = {c.program.digest: _distance(candidate, c) for c in known}
    least = min(far.values())
    near = fmean(off[digest] for digest, how_far in far.items() if how_far <= least + 1e-9)
    trust = 1.0 / (1.0 + least)
    return float(near**trust * min(off.values()) ** (1.0 - trust))


def _distance(one: Candidate, other: Candidate) -> float:
    """Return in how many rewrites two schedules differ; details and numbers count a quarter."""
    names, others = Counter(one.shape), Counter(other.shape)
    odd = (names - others) + (others - names)
    count = sum(n * (0.25 if name in _DETAILS else 1.0) for name, n in odd.items())
    return count + 0.25 * abs(math.log2(_num_chunks(one) / _num_chunks(other)))


def _num_chunks(candidate: Candidate) -> int:
    return max((r.num_chunks for r in candidate.program.regions), default=1)


def checked(allow: Iterable[str]) -> tuple[str, ...]:
    """Return the user's `allow` as a tuple, if all of it can be allowed; one word may be alone."""
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for word in allowed:
        if word not in ALLOWED:
            raise ProgramError(f"tune cannot allow {word!r}; it can allow {', '.join(ALLOWED)}")
    return allowed


def search(
    program: Program,
    costs: MachineCosts,
    *,
    allow: Iterable[str] = (),
    budget_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Return the schedules of a program that may be fast."""
    allowed = checked(allow)
    out = Search()
    seen: dict[str, Candidate] = {}
    kept = [_candidate(program, costs)]
    seen[program.digest] = kept[0]
    ends_s = clock() + budget_s
    for stage in _stages(allowed, costs):
        found = list(kept)
        for candidate in kept:
            for way in filter(None, stage(candidate.program)):
                if clock() > ends_s:
                    break
                out.num_tried += 1
                made = _tried(candidate.program, way, costs, seen)
                if made is not None and made not in found:
                    found.append(made)
        kept = _kept(found, program.digest)
    out.candidates = sorted(seen.values(), key=lambda c: c.predicted_s)
    return out


def _kept(found: list[Candidate], given: str) -> list[Candidate]:
    """Return those that go on: the fastest, not all of one shape, and the given one."""
    shapes: Counter[tuple[str, ...]] = Counter()
    out: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: c.predicted_s):
        shapes[candidate.shape] += 1
        if len(out) < _KEPT and shapes[candidate.shape] <= _SHAPE_MAX:
            out.append(candidate)
    return out + [c for c in found if c.program.digest == given and c not in out]


def _is_near(some: float, other: float, share: float) -> bool:
    return abs(some - other) <= share * max(abs(some), abs(other))


def _candidate(program: Program, costs: MachineCosts) -> Candidate:
    return Candidate(program=program, predicted_s=simulate(lower(program), costs).step_s)


def _tried(
    program: Program, way: Way, costs: MachineCosts, seen: dict[str, Candidate]
) -> Candidate | None:
    """Return the program after a way, or None where a rewrite refuses."""
    try:
        for rewrite in way:
            program = program.apply(rewrite.name, *rewrite.args, **dict(rewrite.options))
        if program.digest not in seen:
            seen[program.digest] = _candidate(program, costs)
    except ProgramError:
        return None
    return seen[program.digest]


def _stages(allowed: tuple[str, ...], costs: MachineCosts) -> list[Stage]:
    is_sliced, dtypes = "sliced" in allowed, [word for word in allowed if word != "sliced"]
    halves, turned = partial(_halves, is_sliced=is_sliced), partial(_turned, is_sliced=is_sliced)
    what: list[Stage] = [_hier, halves, turned, partial(_wires, dtypes=dtypes)]
    how: list[Stage] = [_rings, _fused, _joined, _buckets, _chunks, _overlaps, _orders]
    return [*what, *how, partial(_algos, costs=costs)]


def _rewrite(name: str, *args: Attr, **options: Attr) -> Rewrite:
    return Rewrite(name=name, args=args, options=tuple(options.items()))


def _large(program: Program, *ops: str) -> list[Node]:
    """Return the moves of some operations that are large enough to matter."""
    return [
        node
        for node in program.nodes
        if is_move(node.op)
        and (not ops or node.op in ops)
        and sent_bytes(node, program) >= _LARGE_BYTES
    ]


# -- what is computed and sent -----------------------------------------------------------------


def _hier(program: Program) -> Iterator[Way]:
    """Yield collectives along several axes done axis by axis."""
    wide = [node for node in _large(program, "all_reduce", "all_gather") if len(node.axes) > 1]
    yield tuple(_rewrite("hier", node.name) for node in wide)


def _halves(program: Program, is_sliced: bool) -> Iterator[Way]:
    """Yield all-reduces in halves, with gathers as far down as they go."""
    moves = _large(program, "all_reduce")
    if not moves:
        return
    split = [_rewrite("split", node.name) for node in moves]
    try:
        halved = program
        for rewrite in split:
            halved = halved.apply(rewrite.name, *rewrite.args)
    except ProgramError:
        return
    yield tuple(split)
    yield from _sunk(halved, split, is_sliced)


def _sunk(halved: Program, split: list[Rewrite], is_sliced: bool) -> Iterator[Way]:
    old = {str(rewrite.args[0]) for rewrite in split}
    gathers = [n.name for n in _large(halved, "all_gather") if n.name not in old]
    sinks: list[Rewrite] = []
    sunk = halved
    for name in gathers:
        try:
            sunk = sunk.apply("sink", name)
        except ProgramError:
            continue
        sinks.append(_rewrite("sink", name))
    if sinks:
        yield (*split, *sinks)
    # States that are returned stay whole: the caller uses them.
    states = _gathered_states(sunk)
    if is_sliced and sinks and states:
        yield (*split, *sinks, _rewrite("keep_sliced", *states))


def _gathered_states(program: Program) -> list[str]:
    """Return the states whose new values are gathered and that the program does not return."""
    return [
        state
        for state, last in program.states.items()
        if program[program[last].inputs[1]].op == "all_gather" and last not in program.outputs
    ]


def _turned(program: Program, is_sliced: bool) -> Iterator[Way]:
    """Yield loads rotated some steps ahead, and states gathered where the next step reads them."""
    loads = [node.name for node in program.nodes if node.op == "load"]
    for steps in (1, 2):
        yield tuple(_rewrite("rotate", name, steps) for name in loads)
    states = _gathered_states(program) if is_sliced else []
    yield tuple(_rewrite("rotate", state) for state in states)


def _wires(program: Program, dtypes: list[str]) -> Iterator[Way]:
    for dtype in dtypes:
        yield (_rewrite("wire", dtype=dtype),)


# -- how it is carried out ---------------------------------------------------------------------


def _rings(program: Program) -> Iterator[Way]:
    """Yield products as rings with the gather before or the scatter after them."""
    ways = []
    for node in _large(program, "all_gather", "reduce_scatter"):
        beside = program.users[node.name] if node.op == "all_gather" else node.inputs
        products = [name for name in beside if program[name].op == "matmul"]
        if products:
            ways.append(_rewrite("ring", node.name, *products))
    yield tuple(ways)


def _fused(program: Program) -> Iterator[Way]:
    """Yield all elementwise work in as few kernels as possible."""
    yield tuple(_rewrite("fuse", *group) for group in _kernels(program))


def _kernels(program: Program) -> list[tuple[str, ...]]:
    """Return groups of nodes that can be one kernel each: of one shape, with nothing between."""
    taken = {name for region in program.regions for name in region.nodes}
    groups: list[list[Node]] = []
    for node in program.nodes:
        is_work = OPS[node.op].kind == "pointwise" or node.op == "update"
        if not is_work or not node.type.ndim or node.name in taken:
            continue
        for group in groups:
            alike = group[0].type.shape == node.type.shape
            alike = alike and group[0].type.layouts == node.type.layouts
            names = (*(n.name for n in group), node.name)
            if alike and not left_between(program, names):
                group.append(node)
                break
        else:
            groups.append([node])
    return [tuple(n.name for n in group) for group in groups if len(group) > 1]


def _joined(program: Program) -> Iterator[Way]:
    """Yield scatter, work and gather fused into one task."""
    ways: list[Rewrite] = []
    for node in _large(program, "reduce_scatter"):
        below = below_all(program, [node.name])
        ends = [name for name in below if program[name].op == "all_gather"]
        middle = [r for r in program.regions if r.kind == "fuse" and _reads(program, r.nodes, node)]
        if len(ends) == 1 and not middle:
            ways.append(_rewrite("fuse", node.name, ends[0]))
    yield tuple(ways)


def _reads(program: Program, names: tuple[str, ...], node: Node) -> bool:
    return any(node.name in program[name].inputs for name in names)


def _buckets(program: Program) -> Iterator[Way]:
    """Yield moves of one kind in buckets of some size."""
    alike: dict[tuple[Attr, ...], list[Node]] = {}
    for node in program.nodes:
        if node.op in ("all_reduce", "reduce_scatter", "all_gather"):
            kind = (node.op, node.axes, node.attr("op"), node.attr("wire"), node.type.dtype)
            alike.setdefault(kind, []).append(node)
    for most in _BUCKET_BYTES:
        yield tuple(
            _rewrite("bucket", *names)
            for moves in alike.values()
            for names in _filled(program, moves, most)
        )


def _filled(program: Program, moves: list[Node], most_bytes: int) -> list[tuple[str, ...]]:
    """Return the names of moves in groups of at most so many bytes, groups of one left out."""
    groups: list[list[str]] = [[]]
    total = 0
    for node in moves:
        size_bytes = sent_bytes(node, program)
        if groups[-1] and total + size_bytes > most_bytes:
            groups.append([])
            total = 0
        groups[-1].append(node.name)
        total += size_bytes
    return [tuple(names) for names in groups if len(names) > 1]


def _chunks(program: Program) -> Iterator[Way]:
    """Yield moves and the work around them in chunks that overlap."""
    regions = _around(program)
    if not regions:
        return
    smallest = min(max(sent_bytes(program[m], program) for m in moves) for moves, _ in regions)
    units = sum(_num_units(program, names) for _, names in regions)
    for count in _CHUNKS:
        is_fine = smallest // count >= _CHUNK_BYTES_MIN and units * count <= _TASKS_MAX
        if count == _CHUNKS[0] or is_fine:
            cuts = [_rewrite("chunk", count, *names) for _, names in regions]
            yield (*cuts, _rewrite("overlap"))
            inside = {name for _, names in regions for name in names}
            everything = _all_at_once(program)
            if everything is not None and not inside >= set(everything.args):
                yield (*cuts, everything)


def _num_units(program: Program, names: list[str]) -> int:
    """Return how many tasks some nodes become: fused ones are one task."""
    fused = program.region_by_node("fuse")
    return len({fused[name].name if name in fused else name for name in names})


def _around(program: Program) -> list[tuple[list[str], list[str]]]:
    """Return moves, each with the work before and after it that can be cut with it."""
    out: list[tuple[list[str], list[str]]] = []
    taken: set[str] = set()
    for move in _large(program, "all_reduce", "reduce_scatter"):
        if move.name in taken:
            continue
        names = _fed_by(program, move) | {move.name} | _fed_with(program, move)
        if names & taken or len(names) < 2:
            continue
        taken |= names
        ordered = [node.name for node in program.nodes if node.name in names]
        out.append(([n for n in ordered if is_move(program[n].op)], ordered))
    return out


def _fed_by(program: Program, move: Node) -> set[str]:
    """Return the work that only a move needs, up to a product."""
    out: set[str] = set()
    node = program[move.inputs[0]]
    while OPS[node.op].kind in ("pointwise", "matmul") and len(program.users[node.name]) == 1:
        out.add(node.name)
        if OPS[node.op].kind == "matmul" or not node.inputs:
            break
        node = program[node.inputs[0]]
    return out


def _fed_with(program: Program, move: Node) -> set[str]:
    """Return the elementwise work that reads a move, and the gathers at its end."""
    out = {move.name}
    for node in program.nodes:
        is_work = OPS[node.op].kind == "pointwise" or node.op in ("update", "all_gather", "slice")
        if is_work and node.type.ndim and any(name in out for name in node.inputs):
            out.add(node.name)
    fused = [set(r.nodes) for r in program.regions if r.kind == "fuse" and out & set(r.nodes)]
    return out.union(*fused) - {move.name}


def _overlaps(program: Program) -> Iterator[Way]:
    """Yield everything overlapped, as far as values allow."""
    if rewrite := _all_at_once(program):
        yield (rewrite,)


def _all_at_once(program: Program) -> Rewrite | None:
    done = {*program.region_by_node("overlap"), *host_nodes(program)}
    names = [
        node.name
        for node in program.nodes
        if OPS[node.op].kind != "leaf" and node.op != "pick" and node.name not in done
    ]
    moves = [n for n in names if is_move(program[n].op) or OPS[program[n].op].kind == "io"]
    return _rewrite("overlap", *names) if 0 < len(moves) < len(names) else None


def _orders(program: Program) -> Iterator[Way]:
    lanes = Counter(net_lane(n.axes) for n in program.nodes if is_move(n.op))
    yield tuple(_rewrite("priority_by_use", lane) for lane, count in lanes.items() if count > 1)


def _algos(program: Program, costs: MachineCosts) -> Iterator[Way]:
    """Yield large moves with another algorithm, where that was measured to be clearly faster.

    Between two ranks all algorithms are the same.
    """
    known = {name for name, _ in costs.links}
    moves = [
        node
        for node in _large(program, "all_reduce", "reduce_scatter", "all_gather")
        if program.mesh.size(*node.axes) > 2
    ]
    for way in ALGOS:
        names = [
            node.name
            for node in moves
            if f"{axes_of(node)}/{node.op}/{way}" in known
            and can_do(node, way)
            and _alone_s(node, way, program, costs)
            < _WAY_SHARE * _alone_s(node, None, program, costs)
        ]
        if names:
            yield (_rewrite("algo", *names, way=way),)


def _alone_s(node: Node, way: str | None, program: Program, costs: MachineCosts) -> float:
    link = costs.link(axes_of(node), node.op, way)
    return link.latency_s + sent_bytes(node, program) / link.bytes_s
