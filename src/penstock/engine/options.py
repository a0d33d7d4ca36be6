"""The arguments of a loader, checked in one place, when the loader is made.

Each argument is either kept in a plain type or refused with a sentence that says what to write
instead. All code behind this value can rely on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.arguments import count_of, flag_of, function_of, optional_count, word_of
from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.engine.columnar import can_make_columns, stays_bytes
from penstock.engine.decode import Collate, Transform
from penstock.engine.gather import can_gather
from penstock.engine.stream import WINDOW_BYTES, make_order, shuffle_of
from penstock.errors import OptionError
from penstock.order import BlocksOrder, ColdOrder, Order
from penstock.order.importance import Importance
from penstock.order.keys import seed_of
from penstock.storage.tier_sizes import Disk, Memory
from penstock.trace.recorder import TRACE_VARIABLE
from penstock.units import bytes_of
from penstock.world import World


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of `Loader`, which explains them, and the order that follows from them."""

    dataset: Dataset | Mixture
    batch_size: int | None = None
    global_batch_size: int | None = None
    epochs: int | None = 1
    seed: int = 0
    shuffle: Importance | str | bool | None = "default"
    drop_last: bool = False
    world: World | None = None
    transform: Transform | None = None
    collate: Collate | None = None
    pad: Mapping[str, Any] | None = None
    workers: str | int = "auto"
    threads: int | None = None
    tiers: Sequence[Memory | Disk] = ()
    peers: bool | str | os.PathLike[str] = False
    assignment: str = "fixed"
    look_ahead: int | str = "512MB"
    output: str = "auto"
    trace: str | Path | None = None
    order: Order = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "dataset": _dataset_of(self.dataset),
            "batch_size": optional_count("batch_size", self.batch_size),
            "global_batch_size": optional_count("global_batch_size", self.global_batch_size),
            "epochs": optional_count("epochs", self.epochs, hint="None never ends"),
            "seed": seed_of(self.seed),
            "shuffle": shuffle_of(self.shuffle),
            "drop_last": flag_of("drop_last", self.drop_last),
            "world": _world_of(self.world),
            "transform": function_of("transform", self.transform),
            "collate": function_of("collate", self.collate),
            "pad": _padding_of(self.pad),
            "workers": _workers_of(self.workers),
            "threads": optional_count("threads", self.threads),
            "tiers": _tiers_of(self.tiers),
            "peers": _peers_of(self.peers),
            "assignment": word_of("assignment", self.assignment, ("fixed", "locality")),
            "look_ahead": count_of("look_ahead", bytes_of(self.look_ahead)),
            "output": word_of("output", self.output, ("auto", "torch", "numpy")),
            "trace": _trace_of(self.trace),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()
        order = make_order(self.dataset, self.shuffle, self.seed, self.global_batch_size)
        object.__setattr__(self, "order", order)

    def _check_together(self) -> None:
        """Refuse arguments that make no sense together."""
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise OptionError(
                "give batch_size (samples on each rank) or global_batch_size (on all ranks), one "
                f"of them; got {self.batch_size} and {self.global_batch_size}"
            )
        if self.collate is not None and self.pad:
            raise OptionError("pad= fills up what Penstock joins; with collate= you join yourself")
        if self.pad and self.transform is None:
            fields = self.dataset.fields
            for name in self.pad.keys() - fields.keys():
                raise OptionError(f"pad= names a field {name!r}, samples have: {', '.join(fields)}")

    @property
    def padding(self) -> Mapping[str, Any]:
        """Fields to fill up, each with its fill value."""
        return self.pad or {}

    @property
    def wishes(self) -> tuple[Memory | Disk, ...]:
        """The tiers that the user asked for."""
        return tuple(self.tiers)

    @property
    def look_ahead_bytes(self) -> int:
        """Bytes of batches that are made ahead."""
        return bytes_of(self.look_ahead)

    @property
    def meets_at(self) -> bool | str:
        """Whether nodes use each other's tiers, and where they meet if not in torch's store."""
        return self.peers if isinstance(self.peers, bool) else os.fspath(self.peers)

    @property
    def is_default_order(self) -> bool:
        """Whether the order is the default."""
        return self.shuffle == "default"

    @property
    def makes_columns(self) -> bool:
        """Whether a batch is made a field at a time: no code runs for a single sample."""
        is_plain = self.transform is None and self.collate is None and not self.pad
        bounds = self.dataset.bound
        return is_plain and can_make_columns(bounds)

    @property
    def needs_workers(self) -> bool:
        """Whether code runs for single samples: built-in decoders of images, or the user's."""
        return not (self.copies_only or self.makes_columns)

    @property
    def copies_only(self) -> bool:
        """Whether bytes go into the batch unchanged."""
        is_plain = self.transform is None and self.collate is None and not self.pad
        bounds = self.dataset.bound
        return is_plain and (can_gather(bounds) or stays_bytes(bounds))

    @property
    def stage_bytes(self) -> int:
        """The memory for blocks: the window in use, and the next one."""
        in_blocks = isinstance(self.order, BlocksOrder | ColdOrder)
        return max(self.look_ahead_bytes, 2 * WINDOW_BYTES if in_blocks else 0)


def _dataset_of(dataset: Any) -> Dataset | Mixture:
    if isinstance(dataset, Dataset | Mixture):
        return dataset
    if isinstance(dataset, str | os.PathLike):
        name = os.fspath(dataset)
        raise OptionError(
            f"{name!r} is a name and not yet a data set; write "
            f"penstock.Loader(penstock.open({name!r}), …)"
        )
    hint = ""
    if isinstance(dataset, list | tuple) and all(isinstance(d, Dataset) for d in dataset):
        hint = "; several of them are a penstock.Mixture([…])"
    raise OptionError(
        f"a loader reads a penstock.Dataset, which penstock.open returns, or a penstock.Mixture; "
        f"got {type(dataset).__name__}{hint}"
    )


def _workers_of(workers: Any) -> str | int:
    if isinstance(workers, str):
        hint = {"thread": "here", "process": "processes"}.get(workers)
        if hint is not None:
            raise OptionError(f"workers={workers!r} is called workers={hint!r} now")
        return word_of("workers", workers, ("auto", "here", "processes"))
    hint = '"auto", "here" or "processes", or the number of worker processes'
    return count_of("workers", workers, hint=hint)


def _world_of(world: Any) -> World | None:
    if world is None or isinstance(world, World):
        return world
    raise OptionError(
        f"world must be a penstock.World(rank=…, num_ranks=…), got {world!r}; of a process group "
        "or device mesh it is penstock.torch.world_of(group)"
    )


def _padding_of(pad: Any) -> dict[str, Any]:
    padding = {} if pad is None else pad
    if isinstance(padding, Mapping):
        fills = padding.values()
        if all(isinstance(v, int | float | complex) or hasattr(v, "__index__") for v in fills):
            return dict(padding)
    raise OptionError(
        f"pad must name fields and the number to fill up each with, such as "
        f'pad={{"tokens": 0}}; got {pad!r}'
    )


def _tiers_of(tiers: Any) -> tuple[Memory | Disk, ...]:
    several = tiers if isinstance(tiers, list | tuple) else [tiers]
    for tier in several:
        if not isinstance(tier, Memory | Disk):
            raise OptionError(
                f"tiers={tier!r}: a tier is a place and a size, such as "
                'tiers=[penstock.Memory("8GB"), penstock.Disk("/scratch", "200GB")]'
            )
    return tuple(several)


def _peers_of(peers: Any) -> bool | str:
    if isinstance(peers, str | os.PathLike):
        return os.fspath(peers)
    return flag_of("peers, if it does not name a folder or bucket,", peers)


def _trace_of(trace: Any) -> str | None:
    if trace is None:
        # `penstock trace` sets it, for loaders of programs that know nothing of tracing.
        trace = os.environ.get(TRACE_VARIABLE) or None
    if trace is None:
        return None
    if isinstance(trace, str | Path):
        return str(Path(trace).absolute())  # Engine and workers may stand elsewhere.
    raise OptionError(f"trace must be the name of a folder to record in, got {trace!r}")
