"""Hooks in the training process: when its loop asks for a batch, gets it, and works on it.

A process may iterate several loaders. The one that it trains on has NEXT rows; a pass over another
one, in between, is a VALIDATE row. A loader is taken for validation if the optimizer has stepped
beside another loader and never beside this one, and gradients are off or it has been read to its
end before. The fact `loaders` says what each one turned out to be.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from penstock.trace.foreign.fetching import PASS, WORK, passes_path
from penstock.trace.foreign.loader_facts import facts_of_loader
from penstock.trace.foreign.measuring import batch_size_of
from penstock.trace.foreign.process import complain, recorder, safely
from penstock.trace.loop import LoopRecorder
from penstock.trace.schema import Flag, Kind
from penstock.trace.windows import ResidentWindows, window_asked_for

_STARTED_NS = 1_000_000
"""A loop that asks so soon after its loader has begun has waited for that beginning as well."""


@dataclass(kw_only=True)
class _LoaderState:
    """One loader, over all passes."""

    name: str
    object_id: int
    num_batches: int = 0
    num_passes: int = 0
    num_optimizer_steps: int = 0
    is_with_gradients: bool = False
    windows: ResidentWindows | None = None


@dataclass(kw_only=True, eq=False)
class _LoaderPass:
    """One pass of a loop over a loader."""

    loader: _LoaderState
    epoch: int
    begun_ns: int
    """When it began; of validation, the part that is not recorded yet. 0: there is none."""
    ready_ns: int
    is_validation: bool = False
    num_batches: int = 0
    num_recorded: int = 0
    """Batches of validation that are in a row."""
    wait_ns: int = 0
    size_bytes: int = 0
    got_ns: int = 0
    """When the loop got the latest batch."""
    is_ended: bool = False


@dataclass(kw_only=True)
class _HookedLoop:
    """The training loop of this process."""

    pid: int
    recorder: Any
    loop: LoopRecorder
    loaders: weakref.WeakKeyDictionary[Any, _LoaderState] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    known: list[_LoaderState] = field(default_factory=list)
    current: _LoaderPass | None = None
    since_step: list[_LoaderPass] = field(default_factory=list)
    """Passes that gave a batch since the optimizer's last step, while gradients were on."""


_TRAINING: _HookedLoop | None = None


def _training() -> _HookedLoop:
    global _TRAINING
    if _TRAINING is None or _TRAINING.pid != os.getpid():
        # A loader inside of a data set is iterated by a worker, which stays one.
        to = recorder("worker" if WORK.worker else "train")
        _TRAINING = _HookedLoop(
            pid=os.getpid(),
            recorder=to,
            loop=LoopRecorder(to),
        )
        atexit.register(_finish, _TRAINING)
    return _TRAINING


# -- hooks --------------------------------------------------------------------------------------


def hook_loader(module: Any) -> None:
    """Record loops over torch's DataLoader."""
    _hook_iter(module.DataLoader)
    _hook_next(module._BaseDataLoaderIter)
    _hook_reset(module._MultiProcessingDataLoaderIter)


def hook_stateful_loader(module: Any) -> None:
    """Record loops over torchdata's loader, which brings iterators of its own."""
    _hook_iter(module.StatefulDataLoader)
    for name in ("_StatefulBaseDataLoaderIter", "_StatefulSingleProcessDataLoaderIter"):
        if "__next__" in vars(getattr(module, name, object)):
            _hook_next(getattr(module, name))
    _hook_reset(module._StatefulMultiProcessingDataLoaderIter)


def hook_optimizer(module: Any) -> None:
    """Count optimizer steps: the loader whose batches they use is the training loader."""

    def stepped(*_: Any) -> None:
        if _TRAINING is not None:
            _count_step(_TRAINING)

    # Where an optimizer is compiled, this is left as it is.
    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]
    module.register_optimizer_step_post_hook(stepped)


def _hook_iter(loader: Any) -> None:
    original = loader.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        begun_ns = time.perf_counter_ns()
        _prepare(self)
        iterator = original(self)
        _begin(self, iterator, begun_ns)
        return iterator

    loader.__iter__ = __iter__


def _hook_next(iterator: Any) -> None:
    original = iterator.__next__

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        reading = self.__dict__.get("_penstock_pass")
        if reading is None or reading.is_ended:
            return original(self)
        return _next(self, reading, original)

    iterator.__next__ = __next__


def _hook_reset(iterator: Any) -> None:
    original = iterator._reset

    @functools.wraps(original)
    def _reset(self: Any, loader: Any, *arguments: Any, **options: Any) -> Any:
        _tell_workers(self, loader)
        return original(self, loader, *arguments, **options)

    iterator._reset = _reset


# -- what they do -------------------------------------------------------------------------------


@safely
def _count_step(training: _HookedLoop) -> None:
    """Count a step of the optimizer for the loaders whose batches it has used.

    A loop may take batches of two loaders for a step.
    """
    for reading in training.since_step:
        if not reading.is_ended:
            reading.loader.num_optimizer_steps += 1
    training.since_step.clear()
    # A loop may end without another question: what follows is not to be counted.
    training.loop.step_ended()


@safely
def _prepare(loader: Any) -> None:
    """Register the loader before its workers start."""
    training = _training()
    if loader in training.loaders:
        return
    number = len(training.known)
    kind = type(loader.dataset)
    name = f"loader {number} ({kind.__module__}.{kind.__qualname__})"
    state = _LoaderState(name=name, object_id=training.recorder.name(name))
    window = window_asked_for()
    state.windows = ResidentWindows(window) if window else None
    training.loaders[loader] = state
    training.known.append(state)
    if number == 0:
        training.recorder.facts(facts_of_loader(loader))


@safely
def _tell_workers(iterator: Any, loader: Any) -> None:
    """Tell workers which pass begins, before they are given its first batch to make."""
    training = _training()
    state = training.loaders.get(loader)
    if state is None:
        return
    told = [PASS.pack(w.pid, state.num_passes, state.num_batches) for w in iterator._workers]
    with passes_path(os.getpid()).open("ab") as out:
        out.write(b"".join(told))


@safely
def _begin(loader: Any, iterator: Any, begun_ns: int) -> None:
    training = _training()
    state = training.loaders[loader]
    iterator._penstock_pass = _LoaderPass(
        loader=state,
        epoch=state.num_passes,
        begun_ns=begun_ns,
        ready_ns=time.perf_counter_ns(),
    )
    state.num_passes += 1
    training.recorder.mark(f"pass over {state.name}", epoch=state.num_passes - 1)


def _next(iterator: Any, reading: _LoaderPass, original: Any) -> Any:
    """Hand out a batch, and record it. What the loader raises goes to the loop."""
    try:
        training = _training()
    except Exception as error:
        complain(f"a batch was not recorded: {type(error).__name__}: {error}")
        return original(iterator)
    asked_ns = _asked(training, reading)
    windows = reading.loader.windows
    if windows is not None and (batch := windows.again()) is not None:
        _got(training, reading, batch, asked_ns, Flag.RESIDENT)
        return batch
    try:
        batch = original(iterator)
    except StopIteration:
        _ended(training, reading)
        raise
    except BaseException:
        # The loop may catch it, a timeout for example, and ask again.
        _interrupted(training)
        raise
    if windows is not None:
        windows.took(batch)
    _got(training, reading, batch, asked_ns, Flag.NONE)
    return batch


def _asked(training: _HookedLoop, reading: _LoaderPass) -> int:
    try:
        asked_ns = training.loop.asked()
        before = training.current
        if before is not None and before is not reading:
            _record_validation(training, before, before.got_ns)
        training.current = reading
        reading.begun_ns = reading.begun_ns or asked_ns
        if not reading.num_batches:
            reading.is_validation = _is_validation(training, reading.loader)
            if asked_ns - reading.ready_ns < _STARTED_NS:
                asked_ns = reading.begun_ns
        WORK.step, WORK.epoch = reading.loader.num_batches, reading.epoch
        return asked_ns
    except Exception as error:
        complain(f"_asked: {type(error).__name__}: {error}")
        return time.perf_counter_ns()


@safely
def _got(
    training: _HookedLoop, reading: _LoaderPass, batch: Any, asked_ns: int, flags: int
) -> None:
    reading.got_ns = time.perf_counter_ns()
    wait_ns = reading.got_ns - asked_ns
    count, size_bytes = batch_size_of(batch)
    step = reading.loader.num_batches
    reading.num_batches += 1
    reading.loader.num_batches += 1
    if reading.is_validation:
        reading.wait_ns += wait_ns
        reading.size_bytes += size_bytes
        return
    torch: Any = sys.modules.get("torch")
    if reading not in training.since_step and torch is not None and torch.is_grad_enabled():
        training.since_step = [p for p in training.since_step if not p.is_ended] + [reading]
    training.loop.got(
        asked_ns,
        wait_ns=wait_ns,
        step=step,
        epoch=reading.epoch,
        count=count,
        size_bytes=size_bytes,
        flags=flags,
        object_id=reading.loader.object_id,
    )


@safely
def _ended(training: _HookedLoop, reading: _LoaderPass) -> None:
    now_ns = time.perf_counter_ns()
    training.loop.ended()
    _record_validation(training, reading, now_ns)
    reading.is_ended = True
    _record_loaders(training)


@safely
def _interrupted(training: _HookedLoop) -> None:
    training.loop.ended()


def _record_validation(training: _HookedLoop, reading: _LoaderPass, end_ns: int) -> None:
    """Record a pass of validation, which ends with its loader, or when the loop turns to another.

    Many loops leave it in the midst, and the loader hears nothing of that.
    """
    if not reading.is_validation or not reading.begun_ns:
        return
    training.recorder.span(
        Kind.VALIDATE,
        reading.begun_ns,
        end_ns,
        object_id=reading.loader.object_id,
        count=reading.num_batches - reading.num_recorded,
        wait_ns=reading.wait_ns,
        size_bytes=reading.size_bytes,
        epoch=reading.epoch,
    )
    reading.num_recorded = reading.num_batches
    reading.begun_ns = reading.wait_ns = reading.size_bytes = 0
    _record_loaders(training)


def _record_loaders(training: _HookedLoop) -> None:
    training.recorder.facts({"loaders": {s.name: _summary(training, s) for s in training.known}})


@safely
def _finish(training: _HookedLoop) -> None:
    """Record what is known at the end of the process: the last pass may have been left."""
    if training.pid != os.getpid():
        return
    training.loop.ended()
    if training.current is not None:
        _record_validation(training, training.current, training.current.got_ns)
    _record_loaders(training)


def _summary(training: _HookedLoop, state: _LoaderState) -> dict[str, Any]:
    return {
        "batches": state.num_batches,
        "passes": state.num_passes,
        "optimizer_steps": state.num_optimizer_steps,
        "role": "validate" if _is_validation(training, state) else "train",
    }


def _is_validation(training: _HookedLoop, state: _LoaderState) -> bool:
    torch: Any = sys.modules.get("torch")
    has_gradients = torch is not None and torch.is_grad_enabled()
    state.is_with_gradients |= has_gradients
    if state.num_optimizer_steps:
        return False
    others = [other for other in training.known if other is not state]
    if any(other.num_optimizer_steps for other in others):
        return not has_gradients or state.num_passes > 1
    return not state.is_with_gradients and any(other.is_with_gradients for other in others)
