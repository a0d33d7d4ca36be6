"""Train a model as it is on several ranks; sending hides behind backward and the next forward.

    attached = attach(model, optimizer)

    for x, y in batches:                # as before
        optimizer.zero_grad()
        loss(model(x), y).backward()    # gradients are reduced and scattered as they appear
        optimizer.step()                # each rank updates its slice; gathers begin
                                        # the next forward waits, module by module, for its weights

Optimizer state is kept in slices, 1/W a rank. Gathers go in the order in which the next forward
needs the weights. Gradients are means over ranks. What is different from the plain loop:

* After `backward`, a read of `param.grad` puts the mean over ranks there, as DDP has it: all ranks
  read then, and one more gather is made. After `step` it is None, so
  `zero_grad(set_to_none=False)` leaves no zeros for the next one.
* After `step`, a read of a parameter waits for its weights, wherever the parameter was kept.
* `optimizer.state_dict()` is whole and like torch's; any rank may call it, alone or with others.
* Clipping needs the norm of all gradients before the first update, so none starts before the last
  gradient has been reduced, and less of the gathers is hidden. `attach(clip=…)` costs least, then
  `attached.clip_grad_norm_`; torch's own functions are right as well, and read all gradients.
* With `reshard`, weights are whole only while a module runs; elsewhere in `attached.whole()`. Reads
  of `param.grad` are refused.

If forward or backward raises, the loop may go on: gradients that changed after they were sent are
sent again by `step`.

On a GPU no host waits for its device: lanes are streams, and where it says "waits" above, the
current stream does. Norms stay on the device. Which parameters have gradients is agreed on between
hosts, over gloo, once a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import OptionError, StateError
from penstock.step.attached import fit
from penstock.step.attached.blocks import KeptShare, cut_in_blocks
from penstock.step.attached.checkpoint import Checkpoint
from penstock.step.attached.device import (
    device_of,
    flow_of,
    groups_on,
    hosts_of,
    keep_memory,
    lanes_on,
)
from penstock.step.attached.elementwise import rule_of
from penstock.step.attached.flow import BucketFlow
from penstock.step.attached.grads import Grads
from penstock.step.attached.guarded_grads import guard_grad, plain_grad, unread_grad
from penstock.step.attached.hooks import Hooks
from penstock.step.attached.module_weights import begin_rounds, blocks_of_modules
from penstock.step.attached.pending_weights import PendingWeights
from penstock.step.attached.plan import (
    Agreement,
    agree,
    buffers_of,
    check_same,
    described_of,
    grad_places,
    make_flow_plan,
    make_layouts,
    make_shares,
    params_of_modules,
    share_buffers,
    share_weights,
)
from penstock.step.attached.process_end import at_exit, is_failing
from penstock.step.attached.record import Record
from penstock.step.attached.released_grads import ReleasedGrads
from penstock.step.attached.reshard import Rounds, ordinary
from penstock.step.attached.scaling import refuse_narrow, taken_scale
from penstock.step.attached.sharded import Sharding
from penstock.step.attached.share import Share
from penstock.step.attached.shared_arenas import ArenaMemory
from penstock.step.attached.slices import Stepper, options_of
from penstock.step.attached.step_exchange import (
    CLIP_NORM,
    CLIP_VALUE,
    CLOSE,
    READ,
    STEP,
    UNSCALE,
    StepMessage,
)
from penstock.step.attached.streams import StreamFlow
from penstock.step.attached.update import Updates
from penstock.step.comms.checks import WIRES
from penstock.step.comms.recording import record_step
from penstock.step.groups import Groups
from penstock.step.program.mesh import Mesh
from penstock.units import bytes_of

__all__ = ["Attached", "attach"]

_OPEN: weakref.WeakSet[Attached] = weakref.WeakSet()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    mesh: Mesh | Groups | None = None,
    *,
    clip: float | None = None,
    wire: str | None = None,
    dtype: torch.dtype | None = None,
    buckets: int | str | Literal["auto"] = "auto",
    reshard: bool = False,
) -> Attached:
    """Make a model's steps data-parallel, with the network hidden where it can be.

    All ranks call it with the same model; they begin with the weights and buffers of rank 0. After
    that each rank has buffers of its own. The first step is slow: it records in which order
    gradients appear and weights are used.

    With one rank nothing is sent: the optimizer makes its own steps, and nothing is hooked.

    Args:
        model: parameters that the optimizer has and that need gradients are attached.
        optimizer: any whose step treats elements one by one, which is tried out, or `LAMB`. Its
            state may be there already.
        mesh: ranks that share a model, along axis "dp" or the only one; all ranks by default. Ranks
            of one host share memory; `Groups` instead of a mesh keeps to what they are made for.
            A model on a GPU takes NCCL, or peer pointers if `Groups(..., backend="peer")` says so.
        clip: the largest norm of all gradients together, as in `clip_grad_norm_`.
        wire: "bf16" sends half the bytes; approximate. Weights are kept exact in slices.
        dtype: compute with weights of this type (bfloat16, float16), and keep float32 ones in
            slices.
        buckets: size of what is sent in one go, or "auto" by the speed of the network.
        reshard: keep weights in slices as well, and whole ones only while a module runs.
    """
    from penstock.step.attached.one_rank import AttachedAlone  # which is an Attached

    ranks = (mesh.mesh if isinstance(mesh, Groups) else mesh) or fit.everyone()
    kind = AttachedAlone if ranks.size(fit.axis_of(ranks, clip)) == 1 else Attached
    attached = kind(
        model,
        optimizer,
        mesh,
        clip=clip,
        wire=wire,
        dtype=dtype,
        buckets=buckets,
        reshard=reshard,
    )
    attached._open()
    return attached


class Attached:
    """A model and an optimizer that are attached; see `attach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: Mesh | Groups | None,
        *,
        clip: float | None,
        wire: str | None,
        dtype: torch.dtype | None,
        buckets: int | str,
        reshard: bool,
    ) -> None:
        fit.check_options(clip, wire, dtype)
        self._model, self._optimizer = model, optimizer
        self._params = fit.attachable(optimizer)
        fit.check_fit(model, optimizer, self._params, _taken())
        self._rule = rule_of(optimizer, self._params)
        self._device = device_of(self._params)
        self._numbers = {param: number for number, param in enumerate(self._params)}
        self._first_groups = fit.group_numbers(optimizer.param_groups, self._numbers)
        self._reshard = reshard
        if reshard:
            fit.check_reshard(model)
        self._owns_groups = not isinstance(mesh, Groups)
        self._groups = (
            mesh if isinstance(mesh, Groups) else groups_on(self._device, mesh or fit.everyone())
        )
        self._hosts = hosts_of(self._groups, self._device)
        self._axis = fit.axis_of(self._groups.mesh, clip)
        self._clip, self._wire, self._dtype = clip, wire, dtype
        self._unit_bytes = None if buckets == "auto" else max(1, bytes_of(buckets))
        self._hooks, self._record = Hooks(), Record(self._params)
        self._is_accumulating = self._is_open = False
        self._rate = 0.0
        self._stepped_ns = 0
        self._checkpoint = Checkpoint(
            optimizer,
            self._rule,
            self._params,
            settle=self._settle,
            meet=self._come_together,
            sharding=Sharding(self._groups.mesh, self._axis, self._device),
            is_wide=wire is not None or dtype is not None,
        )
        self._grads: Grads | None = None
        self._shares: list[Share] = []
        self._flow: BucketFlow | None = None
        self._updates: Updates | None = None
        self._weights: PendingWeights | None = None
        self._memory: ArenaMemory | None = None

    def _open(self) -> None:
        self._groups.__enter__()
        self._lanes = lanes_on(self._device, self._groups, self._hosts, self._axis)
        options = f"{self._clip=} {self._wire=} {self._dtype=} {self._unit_bytes=} {self._reshard=}"
        described = described_of(self._optimizer, self._params, self._model, options)
        check_same(described, self._lanes.control)
        every = list(dict.fromkeys([*self._model.parameters(), *self._params]))
        self._rate = share_weights(every, self._lanes.gather, self._lanes.control)
        share_buffers(buffers_of(self._model), self._lanes.control)
        if self._dtype is not None:
            for param in every:
                if param.dtype == torch.float32:
                    if param in self._numbers:
                        self._checkpoint.masters[self._numbers[param]] = param.data
                    param.data = param.data.to(self._dtype)
            self._hooks.on_inputs(self._model, self._dtype)
        self._record.watch(self._model)
        self._hooks.on_grads(self._params, self._before_grad, self._after_grad)
        self._hooks.on_state_dicts(self._model, self._checkpoint)
        self._checkpoint.stand_in()
        self._hooks.on_reads(self._model, self._before_read, self._unread)
        methods: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "zero_grad": self._zero_grad,
            "state_dict": self.state_dict,
            "load_state_dict": self.load_state_dict,
        }
        self._hooks.on_optimizer(self._optimizer, methods, self._unscale)
        self._is_open = True
        _OPEN.add(self)
        at_exit(self._finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    # -- what a user may ask for -------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Send nothing in this block: backward adds up gradients, which a later step sends.

        It saves what would be sent more than once; values are the same without it.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def synchronize(self) -> None:
        """Return when all weights of the last step are there; on a GPU, its stream waits.

        With `reshard` all ranks call it, and none needs another for an evaluation after that:
        ranks that have not evaluated equally often call it before they wait for each other.
        """
        self._settle()
        if isinstance(self._flow, Rounds):
            self._flow.end_rounds()

    def _finish(self) -> None:
        """Return when no other rank needs this one, or some time later: the process ends."""
        if not self._is_open:
            return
        self._settle()
        if self._device.type == "cuda":
            # Peers may read its memory until its streams have met theirs.
            torch.cuda.synchronize(self._device)
        if not is_failing():  # who ends by an error waits for nobody
            self._checkpoint.leave()

    def _settle(self) -> None:
        if isinstance(self._flow, Rounds):
            self._flow.drain()
        elif self._weights is not None:
            self._weights.wait()

    def _come_together(self, call: str) -> None:
        """Meet all ranks, which make the same call; those that do not are told, and so is this."""
        self._settle()
        if isinstance(self._flow, Rounds):
            self._flow.meet("state")
        elif self._grads is not None:
            self._grads.agree(self._lanes.control, StepMessage(call=call, options=()))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Have all weights in this block, to read or to change; all ranks enter it together.

        Only with `reshard` are they anywhere else before; changes must be the same on all ranks.
        Steps are made outside.
        """
        self._settle()
        if not isinstance(self._flow, Rounds):
            yield
            return
        try:
            with self._flow.whole():
                yield
        finally:
            self._checkpoint.count_change()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step before clipping; None without `clip`."""
        norm = None if self._updates is None else self._updates.norm
        if norm is not None and isinstance(self._flow, StreamFlow):
            self._flow.follow(norm)
        return norm

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far."""
        lanes = self._lanes
        return lanes.scatter.sent_bytes + lanes.gather.sent_bytes + lanes.control.sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as torch would; other ranks need not call it.

        torch.distributed.checkpoint, on all ranks, has it in DTensors.
        """
        return self._checkpoint.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of torch's optimizer, or of an attached one with any number of ranks."""
        self._checkpoint.load_state_dict(state_dict)

    def join_hook(self, **_: Any) -> NoReturn:
        """Refuse torch's Join, which has ranks without batches follow the others."""
        raise fit.no_join()

    def close(self) -> None:
        """Take everything off again; the optimizer has its whole state. All ranks call it."""
        if not self._is_open:
            return
        self._come_together(CLOSE)
        self._is_open = False
        _OPEN.discard(self)
        saved = self.state_dict()
        self._lanes.control.barrier()  # until all have theirs
        self._checkpoint.close()
        self._record.end()
        self._hooks.remove()
        for param in self._params:
            plain_grad(param)
        if isinstance(self._flow, Rounds):
            self._flow.stay_whole()
            for share in self._shares:
                share.arena.move_apart([self._params[number] for number in share.params])
            keep_memory(self._lanes, True)
        self._optimizer.load_state_dict(saved)
        if self._memory is not None:
            self._memory.close()
        if self._hosts is not self._groups:
            self._hosts.close()
        if self._owns_groups:
            self._groups.close()

    # -- backward ----------------------------------------------------------------------------

    def _before_grad(self, number: int) -> None:
        if self._grads is not None:
            self._grads.before(number)

    def _after_grad(self, number: int, param: torch.Tensor) -> None:
        if self._grads is None:
            self._record.graded(number, param, is_accumulating=self._is_accumulating)
            if not self._is_accumulating:
                guard_grad(param, partial(self._before_grad_read, number))
        else:
            self._grads.after(number, is_accumulating=self._is_accumulating)

    # -- step --------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's slices and begin the gathers."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._advance()
        # From one update to the next: forward and backward are not told apart here.
        self._stepped_ns = record_step(self._stepped_ns)
        return loss

    def _advance(self) -> None:
        options, names = options_of(self._optimizer), self._optimizer.defaults
        said = [{name: group.get(name) for name in names} for group in options.groups]
        used, grads, updates = self._meet(STEP, said)
        scale, is_void = taken_scale(self._optimizer)
        if is_void:
            updates.skip()
        else:
            if scale is not None:
                updates.scale(scale.double().reciprocal().float())
            for number in used:
                torch.autograd.graph.increment_version(self._params[number])
            updates.run(options, used)
        grads.clear()
        if self._weights is not None and not is_void:
            self._weights.begin(used)
        self._checkpoint.count_change()

    @torch.no_grad()
    def _unscale(self, factor: torch.Tensor) -> torch.Tensor:
        """Multiply sums of gradients for a scaler; return whether any rank has infinite ones."""
        refuse_narrow(self._params)
        _, grads, updates = self._meet(UNSCALE, [{"factor": float(factor)}])
        updates.scale(factor)
        grads.clipped()
        return updates.found_inf()

    def _meet(
        self, call: str, options: Sequence[dict[str, Any]]
    ) -> tuple[set[int], Grads, Updates]:
        """Send what is left of all gradients; return the parameters that any rank has one for.

        All ranks come to it, by the same call with the same options.
        """
        fit.check_groups(self._optimizer.param_groups, self._numbers, self._first_groups)
        self._checkpoint.go_on()
        if self._flow is None:
            self._plan()
        flow, grads, updates = self._flow, self._grads, self._updates
        assert flow is not None
        assert grads is not None
        assert updates is not None
        self._checkpoint.end()
        if isinstance(flow, Rounds) and flow.is_whole:
            raise StateError(f"{call} within attached.whole(): leave it first, on all ranks")
        self._settle()
        if not isinstance(flow, Rounds):
            for share in self._shares:
                share.arena.bring_home([self._params[number] for number in share.params])
        grads.bring_the_rest()
        flow.send_all()
        if grads.take_means():
            updates.take_means()
        used = grads.agree(self._lanes.control, StepMessage(call=call, options=options))
        return used, grads, updates

    def _before_grad_read(self, number: int) -> None:
        """Have all ranks put the means of gradients where this rank is about to read one."""
        if self._is_accumulating or not self._is_open or self._params[number].grad is None:
            return
        if self._reshard:
            raise unread_grad()
        if self._grads is None or not self._grads.are_means:
            before = [param.grad for param in self._params]
            with ordinary():
                used, grads, updates = self._meet(READ, [])
                updates.show_means()
                grads.means_came(used, before)

    # -- clipping ----------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by their norm, and return it, as it was before.

        As `torch.nn.utils.clip_grad_norm_` does with what DDP has: all ranks call it after the last
        backward and before the step. With an infinite `max_norm` it only measures. What is the
        same in each step is better given to `attach(clip=...)`, which needs no exchange more.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        fit.check_norms(max_norm, norm_type)
        options = {"max_norm": max_norm, "norm_type": norm_type}
        _, grads, updates = self._meet(CLIP_NORM, [options])
        updates.clip_norm(max_norm, norm_type)
        grads.clipped()
        norm = self.grad_norm
        assert norm is not None
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of order {norm_type} of all gradients is {float(norm)}")
        return norm.to(torch.promote_types(torch.float32, self._params[0].dtype))

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradients, which are means over ranks, to this size.

        All ranks call it after the last backward and before the step.
        """
        clip_value = float(clip_value)
        if not clip_value >= 0:
            raise OptionError(f"clip_grad_value_({clip_value}): a size is at least 0")
        _, grads, updates = self._meet(CLIP_VALUE, [{"clip_value": clip_value}])
        updates.clip_value(clip_value)
        grads.clipped()

    # -- the first step ----------------------------------------------------------------------

    def _plan(self) -> None:
        fit.warn_of_strangers(self._model, _taken())
        self._record.check(self._params)
        self._record.end()
        sizes = [param.numel() * param.element_size() for param in self._params]
        agreement = agree(
            self._record,
            sizes,
            self._unit_bytes,
            self._rate,
            self._lanes.control,
            is_gpu=self._device.type == "cuda",
        )
        layouts = make_layouts(self._optimizer, self._numbers, agreement, self._lanes.control.size)
        if self._reshard:
            layouts = cut_in_blocks(layouts, self._model, unit_bytes=agreement.unit_bytes)
        arenas = [2 * layout.length * params[0].itemsize for _, params, layout in layouts]
        # Who brings groups has chosen what carries; otherwise one host shares its memory.
        may_share = self._owns_groups or self._device.type == "cuda"
        may_share &= not self._reshard
        timeout_s = self._groups.timeout_s
        self._memory = ArenaMemory(
            self._lanes, arenas, may_share=may_share, device=self._device, timeout_s=timeout_s
        )
        self._lanes = self._memory.lanes
        shares, joint = make_shares(
            self._optimizer,
            self._rule,
            self._numbers,
            layouts,
            rank=self._lanes.control.rank,
            take=self._memory.take,
            kind=KeptShare if self._reshard else Share,
        )
        for share in shares:
            share.rounding = None if self._wire is None else WIRES[self._wire]
            if self._wire is not None or self._dtype is not None:
                share.keep_masters(self._checkpoint.masters)
            elif isinstance(share, KeptShare):
                share.keep()
        self._shares = shares
        self._checkpoint.cut(shares, self._lanes.gather)
        self._begin(agreement, joint)

    def _begin(self, agreement: Agreement, joint: Stepper | None) -> None:
        """Let gradients and weights flow."""
        places = grad_places(self._shares)
        plan, shares = make_flow_plan(self._shares, agreement, self._lanes, wire=self._wire)
        pace = partial(self._hosts.comm, self._axis, "pace") if self._reshard else None
        flow, self._updates = flow_of(plan, shares, clip=self._clip, joint=joint, pace=pace)
        self._flow = flow
        if isinstance(flow, Rounds):
            flow.also_begin = self._checkpoint.go_on
            begin_rounds(flow, shares, self._params, agreement, self._record)
            blocks = blocks_of_modules(flow, self._model, self._numbers, self._record)
            self._hooks.on_modules(blocks, flow.enter, flow.leave)
            self._grads = ReleasedGrads(self._params, places, flow, self._before_grad_read)
        else:
            needs = params_of_modules(self._model, self._numbers, self._record)
            self._weights = PendingWeights(self._params, flow)
            self._hooks.on_forward(self._model, self._weights, needs)
            self._grads = Grads(self._params, places, flow, self._before_grad_read)
        timeout_s = self._groups.timeout_s
        self._checkpoint.follow(flow, self._lanes.control, timeout_s=timeout_s)

    # -- around ------------------------------------------------------------------------------

    def _unread(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._weights is None else self._weights.unread()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        with self._unread():
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def _before_read(self) -> None:
        if not isinstance(self._flow, Rounds):  # there they are read in `whole` alone
            self._settle()


def _taken() -> set[torch.Tensor]:
    """Return the parameters that are attached now."""
    return {param for attached in _OPEN for param in attached._params}
