"""A batch: fields by name, and which samples they came from."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.convert import profiled
from penstock.engine.runner import size_of
from penstock.trace import Kind, Recorder


class _CopyRecorder:
    """Holds the recorder of copies to the device; batches cannot, because they are pickled."""

    recorder: Recorder | None = None


_copies = _CopyRecorder()


def record_copies(recorder: Recorder) -> None:
    """Record the copies of all batches of this process from now on."""
    _copies.recorder = recorder


_KINDS_SHOWN = 3
"""Kinds of entries of a list that are named when a batch is printed."""


class Batch(dict[str, Any]):
    """A dictionary of fields: array, tensor or list, with one entry a sample.

    Tools that move dictionaries of tensors work with it; all else is in attributes.
    """

    ids: Any = None
    """Number of each sample in the data set that was given to the loader."""
    mask: Any = None
    """False where a sample only fills up the last batch of an epoch and should not count."""
    epoch: int = 0
    """The epoch that these samples belong to, from 0."""
    step: int = 0
    """Number of this batch in its epoch, from 0; the same on all ranks."""
    weights: Any = None
    """With `shuffle=Importance(…)`, the factor of each sample's loss; 0 where `mask` is False."""
    positions: Any = None
    """Place of each sample in the epoch's order, a NumPy array; where `mask` is False, beyond its
    end."""

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Any],
        *,
        ids: Any,
        mask: Any,
        epoch: int,
        step: int,
        positions: Any = None,
        weights: Any = None,
    ) -> Batch:
        """Return a batch with its attributes."""
        batch = cls(fields)
        batch.ids, batch.mask, batch.epoch, batch.step = ids, mask, epoch, step
        batch.positions, batch.weights = positions, weights
        return batch

    def __repr__(self) -> str:
        """One line a field, never the data: a batch may have gigabytes."""
        lines = {**self, "ids": self.ids, "mask": self.mask}
        if self.weights is not None:
            lines["weights"] = self.weights
        width = max(map(len, map(str, lines)))
        num_samples = "" if self.ids is None else f" of {len(self.ids)} samples"
        said = [f"Batch{num_samples}, epoch {self.epoch}, step {self.step}"]
        return "\n".join(
            [*said, *(f"  {name!s:{width}}  {_shown(v)}" for name, v in lines.items())]
        )

    def __copy__(self) -> Batch:
        return Batch.of(
            self,
            ids=self.ids,
            mask=self.mask,
            epoch=self.epoch,
            step=self.step,
            positions=self.positions,
            weights=self.weights,
        )

    @profiled("penstock.copy")
    def to(self, device: Any, *args: Any, **kwargs: Any) -> Batch:
        """Return the batch with everything that can move moved, as `tensor.to` does."""
        begin_ns = 0 if _copies.recorder is None else time.perf_counter_ns()
        moved = self._each(lambda value: _moved(value, "to", (device, *args), kwargs))
        if _copies.recorder is not None:
            _copies.recorder.span(
                Kind.COPY,
                begin_ns,
                time.perf_counter_ns(),
                step=self.step,
                epoch=self.epoch,
                count=0 if self.ids is None else len(self.ids),
                size_bytes=size_of(dict(self)),
            )
        return moved

    def pin_memory(self, device: Any = None) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls this."""
        arguments = () if device is None else (device,)
        return self._each(lambda value: _moved(value, "pin_memory", arguments, {}))

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        """Return the batch with every field and every column changed."""
        changed = copy.copy(self)
        for name, value in self.items():
            changed[name] = change(value)
        for column in ("ids", "mask", "weights"):
            setattr(changed, column, change(getattr(self, column)))
        return changed


def _moved(value: Any, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_moved(v, verb, args, kwargs) for v in value]
    if type(value) is tuple:
        return tuple(_moved(v, verb, args, kwargs) for v in value)
    if type(value) is dict:
        return {name: _moved(v, verb, args, kwargs) for name, v in value.items()}
    move = getattr(value, verb, None)
    return value if move is None else move(*args, **kwargs)


def _shown(value: Any) -> str:
    """Return a description of a field: type, shape and device."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
        device = getattr(value, "device", "cpu")
        place = f" on {device}" if str(device) != "cpu" else ""
        return f"{kind} {list(shape)}{place}"
    if isinstance(value, list | tuple):
        kinds = list(dict.fromkeys(_shown(v) if hasattr(v, "shape") else _name(v) for v in value))
        some = ", ".join(kinds[:_KINDS_SHOWN]) + ", …" * (len(kinds) > _KINDS_SHOWN)
        return f"{type(value).__name__} of {len(value)}" + f": {some}" * bool(kinds)
    return _name(value)


def _name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
