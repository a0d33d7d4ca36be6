"""Parameters of the application, the data set and the system: value, origin, changeable or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.report.analysis.values import Parameter
from penstock.units import show_bytes, show_count

Show = Callable[[Any], str]


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _sizes(value: Any) -> str:
    if not isinstance(value, Mapping):
        return show_bytes(float(value))
    return ", ".join(f"{k} {show_bytes(float(v))}" for k, v in value.items())


def _tiers(value: Any) -> str:
    shown = []
    for tier in value:
        text = f"{tier.get('source', '?')} {show_bytes(float(tier.get('capacity_bytes', 0)))}"
        if tier.get("held_bytes") is not None:
            text += f" ({show_bytes(float(tier['held_bytes']))} held)"
        shown.append(text)
    return ", ".join(shown) or "none"


def _pairs(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return _text(value)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _count(value: Any) -> str:
    return show_count(value) if isinstance(value, int) else str(value)


_A, _D, _S = "application", "dataset", "system"
_TABLE: dict[str, tuple[str, str, Show, str, bool]] = {
    "loader": (_A, "loader", _text, "config", True),
    "command": (_A, "command", _text, "config", False),
    "framework": (_A, "framework", _pairs, "probe", False),
    "batch_size": (_A, "batch size of a rank", _count, "config", True),
    "global_batch_size": (_A, "global batch size", _count, "config", True),
    "epochs": (_A, "epochs", _count, "config", False),
    "world_size": (_A, "ranks", _count, "config", True),
    "ranks_per_node": (_A, "ranks of a node", _count, "config", True),
    "num_workers": (_A, "workers of a rank", _count, "config", True),
    "workers": (_A, "workers", _text, "config", True),
    "prefetch_factor": (_A, "batches ahead, per worker", _count, "config", True),
    "look_ahead_bytes": (_A, "look-ahead", _sizes, "config", True),
    "pin_memory": (_A, "page-locked memory", _yes, "config", True),
    "persistent_workers": (_A, "workers outlive an epoch", _yes, "config", True),
    "start_method": (_A, "workers start by", _text, "config", True),
    "shuffle": (_A, "shuffle", _text, "config", False),
    "seed": (_A, "seed", _text, "config", False),
    "drop_last": (_A, "last batch dropped", _yes, "config", False),
    "num_threads_torch": (_A, "threads of torch", _count, "config", True),
    "device": (_A, "device", _text, "config", False),
    "dataset_name": (_D, "data set", _text, "config", False),
    "format": (_D, "format", _text, "config", True),
    "num_samples": (_D, "samples", _count, "config", False),
    "dataset_bytes": (_D, "size", _sizes, "config", False),
    "num_files": (_D, "files", _count, "probe", True),
    "sample_bytes": (_D, "size of a sample", _sizes, "probe", True),
    "store": (_D, "store", _text, "config", True),
    "fingerprint": (_D, "fingerprint", _text, "config", False),
    "num_nodes": (_S, "nodes", _count, "config", True),
    "cores": (_S, "usable cores", _count, "probe", True),
    "memory_bytes": (_S, "memory", _sizes, "probe", True),
    "tiers": (_S, "cache tiers", _tiers, "config", True),
    "filesystem": (_S, "file system", _pairs, "probe", True),
    "gpu": (_S, "GPU", _pairs, "probe", False),
    "kernel": (_S, "kernel", _text, "probe", False),
    "python": (_S, "Python", _text, "probe", False),
    "hostname": (_S, "host", _text, "probe", False),
}
"""Family, label, how it is shown, origin, changeable."""


def parameters_of(facts: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the parameters that the facts name, and those that the trace itself shows.

    `measured` has facts of the table that nobody recorded, as the rows show them.
    """
    out = []
    for name, (family, label, show, origin, is_changeable) in _TABLE.items():
        is_stated = facts.get(name) is not None
        value = facts.get(name) if is_stated else measured.get(name)
        if value is None:
            continue
        out.append(
            Parameter(
                family=family,
                name=name,
                label=label,
                value=value,
                shown=_shown(show, value),
                origin=origin if is_stated else "trace",
                is_changeable=is_changeable,
            )
        )
    return tuple(out)


def _shown(show: Show, value: Any) -> str:
    try:
        return show(value)
    except (TypeError, ValueError, AttributeError):
        return str(value)  # A fact of another release or tool, of a type that we do not expect.


def traced_parameter(family: str, name: str, label: str, value: Any, shown: str) -> Parameter:
    """Return a parameter that was measured in the trace; such ones follow from others."""
    return Parameter(
        family=family,
        name=name,
        label=label,
        value=value,
        shown=shown,
        origin="trace",
        is_changeable=False,
    )
