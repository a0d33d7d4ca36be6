"""`Loader`: from a data set to batches in the training loop.

A loader is cheap to make: no thread, file or connection exists before the first batch is asked for.
Iterating it once goes through `epochs` epochs; iterating again goes on with the next. Leaving a
loop early and starting anew begins the same epochs again, as torch's DataLoader does; `state_dict`
is for going on.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.errors import OptionError
from penstock.flow import Budget, Flow
from penstock.flow.live import LiveRates
from penstock.loader.ahead import FillAhead
from penstock.loader.buffers import BufferPool
from penstock.loader.convert import converter
from penstock.loader.decode import Collate, DecodeMaker, Transform, Wishes
from penstock.loader.fetcher import Fetcher
from penstock.loader.gather import GatherMaker, can_gather
from penstock.loader.holding import Holding
from penstock.loader.iteration import Iteration
from penstock.loader.job import Maker, Slot
from penstock.loader.processes import ProcessPool
from penstock.loader.raw import RawMaker, can_stay_raw
from penstock.loader.reads import SampleReader, is_local
from penstock.loader.runner import Runner
from penstock.loader.runs import Runs
from penstock.loader.staging import Stager
from penstock.loader.stats import Counters, Stats, TierStats
from penstock.loader.stream import WINDOW_BYTES, Stream, jobs_of, make_order
from penstock.machine import Machine, default_machine_path, load_machine
from penstock.order import BlocksOrder, ColdOrder, Cursor
from penstock.plan.bound import epoch_bound
from penstock.storage.tier_sizes import Disk, Memory
from penstock.trace import Recorder
from penstock.units import bytes_of
from penstock.world import World

_log = logging.getLogger("penstock.loader")
_REQUESTS_MIN, _REQUESTS_MAX = 8, 64
"""Requests in flight at most, of a rank and of all ranks of a node; the flow finds out how many
help. Ranks do not know of each other: many at once would only queue up at their common link."""
_THREADS_MAX = 32
_COPY_THREADS_MAX = 4
_TINY_JOB_BYTES = 4 << 20
_BATCHES_A_JOB_MAX = 16


class Loader:
    """Batches of a data set, in a known order, on every rank its own share.

    Args:
        dataset: a `Dataset` or a `Mixture`.
        batch_size: samples a batch on this rank.
        global_batch_size: samples a batch on all ranks together, instead of `batch_size`; what a
            batch holds then stays the same on any number of ranks.
        epochs: how many one iteration goes through; None never ends.
        seed: of the order, and of the random numbers that a transform may ask for.
        shuffle: "global" (a fresh uniform permutation each epoch), "blocks" (large reads for
            remote stores; mixes inside a window), "blocks-first" (blocks in epoch 0, while tiers
            are empty, global in all later ones) or None (as stored).
        drop_last: leave out an incomplete last batch; else it is filled up, and `batch.mask` says
            with what.
        world: who takes part; by default torch's process group if there is one, else what
            torchrun, Slurm or MPI say when iteration begins.
        transform: called with each decoded sample, and with a random generator if it takes two
            arguments.
        collate: called with a list of samples, instead of joining their fields.
        pad: fields whose ragged arrays become one array, with the value to fill up with.
        workers: "thread", or "process" for transforms that hold the interpreter's lock.
        threads: how many work on samples; by default this rank's share of the cores.
        tiers: memory and disk of this node that keep what was read, fastest first:
            `[penstock.Memory("8GB"), penstock.Disk("/scratch", "200GB")]`. All ranks and all jobs
            on the node share them.
        look_ahead: bytes of batches made ahead of the training loop.
        output: "torch", "numpy", or "auto" for torch where it is installed.
        trace: a file to write a trace to when the loader is closed; Perfetto opens it.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        epochs: int | None = 1,
        seed: int = 0,
        shuffle: Literal["global", "blocks", "blocks-first"] | None = "global",
        drop_last: bool = False,
        world: World | None = None,
        transform: Transform | None = None,
        collate: Collate | None = None,
        pad: Mapping[str, Any] | None = None,
        workers: Literal["thread", "process"] = "thread",
        threads: int | None = None,
        tiers: Sequence[Memory | Disk] = (),
        look_ahead: int | str = "512MB",
        output: Literal["auto", "torch", "numpy"] = "auto",
        trace: str | Path | None = None,
    ) -> None:
        check_batch(batch_size, global_batch_size)
        check_counts(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            epochs=epochs,
            threads=threads,
            look_ahead=bytes_of(look_ahead),
        )
        if workers not in ("thread", "process"):
            raise OptionError(f"workers={workers!r}: there are 'thread' and 'process'")
        if collate is not None and pad:
            raise OptionError("pad= fills up what Penstock joins; with collate= you join yourself")
        self.dataset = dataset
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.epochs = epochs
        self.seed = seed
        self.drop_last = drop_last
        self.order = make_order(dataset, shuffle, seed, global_batch_size)
        self._world = world
        self._transform = transform
        self._collate = collate
        self._pad = dict(pad or {})
        self._workers = workers
        self._threads = threads
        self._tiers = checked_tiers(tiers)
        self._opened: Opened | None = None
        self._last_tiers: tuple[TierStats, ...] = ()
        self._warm_bytes: int | None = None
        """What the tiers held when they were first opened."""
        self._live: LiveRates | None = None
        self._look_ahead_bytes = bytes_of(look_ahead)
        self._output = output
        self._trace_path = trace
        self._recorder = Recorder() if trace is not None else None
        self._counters = Counters()
        self._cursor = (0, 0)
        self._begin_at = (0, 0)
        self._current: weakref.ref[Iteration] | None = None

    # -- where the stream stands -------------------------------------------------------------

    @property
    def world(self) -> World:
        """The world of this loader; read from the environment when none was given."""
        return self._world or _world_here()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._cursor[0]

    def _stream(self) -> Stream:
        world = self.world
        total = self.global_batch_size or (self.batch_size or 0) * world.num_ranks
        return Stream(
            dataset=self.dataset,
            order=self.order,
            world=world,
            global_batch_size=total,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None never ends, it has no length")
        return self.epochs * self._stream().steps().steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: what was delivered, not what was made ahead."""
        epoch, position = self._cursor
        cursor = Cursor.at(
            self.order, fingerprint=self.dataset.fingerprint, epoch=epoch, position=position
        )
        return dict(cursor.to_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, also on another number of ranks, at the next `iter`."""
        cursor = Cursor.from_state(state, order=self.order, fingerprint=self.dataset.fingerprint)
        self._end_iteration()
        self._cursor = self._begin_at = (cursor.epoch, cursor.position)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at an epoch; nothing changes if it would anyway."""
        if epoch != self._begin_at[0]:
            self._cursor = self._begin_at = (epoch, 0)

    # -- iterating ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.part(0, 1)

    def part(self, first: int, every: int) -> Iterator[Any]:
        """Iterate over every n-th batch from the first on; others are other processes' work."""
        self._end_iteration()
        stream = self._stream()
        epoch, position = self._begin_at
        if stream.steps(position).num_steps == 0:
            # Resumed where no full batch is left, since batches have another size now.
            self._begin_at = (epoch + 1, 0)
        self._cursor = self._begin_at
        iteration = self._start(stream, (first, every))
        self._current = weakref.ref(iteration)
        return iteration

    def _start(self, stream: Stream, part: tuple[int, int]) -> Iteration:
        num_threads = self._threads or _threads_for(stream.world, self._copies_only())
        holding = self._holding()
        pool = BufferPool(self._look_ahead_bytes)
        reader = SampleReader(pool, self._counters, at_random=self.order.mode != "sequential")
        processes = None
        if self._workers == "process":
            processes = ProcessPool(
                num_threads, self.dataset, self._transform, self.seed, self._tiers
            )
        maker = self._maker(pool, reader, num_threads, processes)
        epoch, position = self._begin_at
        end_epoch = None if self.epochs is None else (epoch // self.epochs + 1) * self.epochs
        batches_a_job = self._batches_a_job(maker, stream)
        requests_max = max(_REQUESTS_MIN, _REQUESTS_MAX // _ranks_a_node(stream.world))
        budget = Budget(stage_bytes_max=self._look_ahead_bytes, requests_max=requests_max)
        fetcher = Fetcher(Flow(budget=budget), requests_max=requests_max, live=self._live_rates())
        stager = self._stager(pool, holding, fetcher)
        runner = Runner(
            jobs_of(stream.slots(epoch, position, end_epoch, part), self.dataset, batches_a_job),
            maker,
            stager,
            fetcher=fetcher,
            ahead=self._fill_ahead(stream, stager, end_epoch, part, batches_a_job),
            num_threads=num_threads,
            stage_bytes_max=self._look_ahead_bytes,
            recorder=self._recorder,
        )
        return Iteration(
            runner,
            self._counters,
            converter(self._output),
            delivered=_mover(weakref.ref(self), end_epoch),
            processes=processes,
            recorder=self._recorder,
            holds=self._opened,
        )

    def _copies_only(self) -> bool:
        """Return whether bytes go into the batch as they are."""
        is_plain = self._transform is None and self._collate is None and not self._pad
        bounds = self.dataset.bound
        return (
            is_plain and self._workers == "thread" and (can_gather(bounds) or can_stay_raw(bounds))
        )

    def _maker(
        self,
        pool: BufferPool,
        reader: SampleReader,
        num_threads: int,
        processes: ProcessPool | None,
    ) -> Maker:
        bounds = self.dataset.bound
        if self._copies_only():
            if can_gather(bounds):
                return GatherMaker(bounds, pool, reader, self._counters)
            return RawMaker(pool, reader)
        wishes = Wishes(
            transform=self._transform,
            collate=self._collate,
            padding=self._pad,
            seed=self.seed,
            repeats=isinstance(self.dataset, Mixture),
        )
        return DecodeMaker(
            wishes,
            pool=pool,
            reader=reader,
            counters=self._counters,
            num_threads=num_threads,
            processes=processes,
        )

    def _batches_a_job(self, maker: Maker, stream: Stream) -> int:
        if not isinstance(maker, GatherMaker):
            return 1
        batch_bytes = maker.row_bytes * -(-stream.global_batch_size // stream.world.num_ranks)
        return max(1, min(_BATCHES_A_JOB_MAX, _TINY_JOB_BYTES // max(1, batch_bytes)))

    def _holding(self) -> Holding | None:
        """Return what the tiers hold, which are opened by the first iteration of this process."""
        if not self._tiers:
            return None
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = Opened(Holding(self.dataset, self._tiers))
            if self._warm_bytes is None:
                self._warm_bytes = self._opened.holding.warm_bytes
        return self._opened.holding

    def _live_rates(self) -> LiveRates | None:
        """Return what refines this machine's file, if there is one."""
        path = default_machine_path()
        if self._live is None and path.exists():
            try:
                self._live = LiveRates(load_machine(path))
            except OptionError as error:
                _log.warning("%s", error)
        return self._live

    def machine(self) -> Machine:
        """Return the machine that `penstock probe` measured, refined by what this loader saw."""
        live = self._live_rates()
        return load_machine(default_machine_path()) if live is None else live.machine()

    def _fill_ahead(
        self,
        stream: Stream,
        stager: Stager,
        end_epoch: int | None,
        part: tuple[int, int],
        batches_a_job: int,
    ) -> FillAhead | None:
        if stager.fills is None:
            return None
        epoch, position = self._begin_at
        return FillAhead(
            stream.slots(epoch, position, end_epoch, part),
            self.dataset,
            stager,
            # Whoever has seen a whole epoch has seen every sample.
            num_slots=-(-stream.steps().steps_per_epoch // part[1]) + 1,
            slots_a_job=batches_a_job,
        )

    def _stager(self, pool: BufferPool, holding: Holding | None, fetcher: Fetcher) -> Stager:
        stage_bytes = self._stage_bytes()
        self._warn_of_blocks(stage_bytes)
        return Stager(
            pool,
            self._counters,
            stage_bytes=stage_bytes,
            runs=self._runs(fetcher),
            holding=holding,
            measured=fetcher,
            reads_ahead=self._workers == "thread",
            recorder=self._recorder,
        )

    def _stage_bytes(self) -> int:
        """Return the memory for blocks: the window in use, and the next one on its way."""
        in_blocks = isinstance(self.order, BlocksOrder | ColdOrder)
        return max(self._look_ahead_bytes, 2 * WINDOW_BYTES if in_blocks else 0)

    def _runs(self, fetcher: Fetcher) -> Runs | None:
        """Return the runs that the order goes by, where samples of a run are neighbours."""
        order = self.order.first if isinstance(self.order, ColdOrder) else self.order
        if not isinstance(order, BlocksOrder) or not isinstance(self.dataset, Dataset):
            return None
        if self.dataset.selection is not None:
            return None
        world = self.world
        share = world.num_nodes / world.num_ranks
        num_samples = max(1, len(self.dataset) // order.num_blocks)
        run_bytes = self.dataset.size_bytes // order.num_blocks
        return Runs(
            starts=order.block_starts,
            first_epoch_only=order is not self.order,
            read_whole=lambda: fetcher.reads_whole(share, num_samples, run_bytes),
        )

    def _warn_of_blocks(self, stage_bytes: int) -> None:
        if self.order.mode != "global" or not isinstance(self.dataset, Dataset):
            return
        if self.dataset.bound[0].by_block and self.dataset.size_bytes > stage_bytes:
            num_blocks = sum(b.part.tables[0].num_blocks for b in self.dataset.bound)
            _log.warning(
                "%s can only be read in blocks of about %d samples: with shuffle='global' most "
                "samples cost a whole block. Use shuffle='blocks', or write it anew with "
                "`penstock pack`",
                self.dataset.uri,
                len(self.dataset) // num_blocks,
            )

    # -- closing -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the iteration that runs, with all its threads, and let go of the tiers.

        A summary of the run goes to the log `penstock.loader` (level INFO).
        """
        if self._current is not None:
            _log.info("%s", self.stats())
        self._end_iteration()
        if self._opened is not None:
            self._tier_stats()
            self._opened.close()
            self._opened = None
        if self._recorder is not None and self._trace_path is not None and len(self._recorder):
            world, path = self.world, Path(self._trace_path)
            if world.num_ranks > 1:
                path = path.with_name(f"rank{world.rank}-{path.name}")
            self._recorder.write(path)

    def _end_iteration(self) -> None:
        iteration = self._current() if self._current is not None else None
        self._current = None
        if iteration is not None and iteration.is_open:
            iteration.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stats(self) -> Stats:
        """Return what was counted since the loader was made."""
        iteration = self._current() if self._current is not None else None
        running_s = iteration.running_s if iteration is not None else 0.0
        return self._counters.stats(
            running_s, self._tier_stats(), self._bound_bytes(), self._progress()
        )

    def _tier_stats(self) -> tuple[TierStats, ...]:
        if self._opened is not None and self._opened.pid == os.getpid():
            self._last_tiers = self._opened.holding.stats()
        return self._last_tiers

    def _progress(self) -> float:
        """Return the epochs that were delivered, in samples of the whole world."""
        return self._counters.samples * self.world.num_ranks / self.order.num_samples

    def _bound_bytes(self) -> int | None:
        """Return the least that this rank's part of the job could have read from stores."""
        if not isinstance(self.dataset, Dataset) or self.dataset.selection is not None:
            return None  # Not every sample once an epoch.
        if not self._tiers and all(is_local(b) for b in self.dataset.bound):
            return None  # Read where it lies.
        world = self.world
        cache_bytes = sum(t.capacity_bytes for t in self._last_tiers) * world.num_nodes
        if isinstance(self.order, BlocksOrder):
            cache_bytes += self._stage_bytes() * world.num_ranks  # Blocks stay while there is room.
        progress = self._progress()
        size_bytes = self.dataset.size_bytes
        first = min(1.0, progress) * epoch_bound(size_bytes, self._warm_bytes or 0)
        later = max(0.0, progress - 1) * epoch_bound(size_bytes, cache_bytes)
        return round((first + later) / world.num_ranks)

    def __repr__(self) -> str:
        size = self.batch_size or self.global_batch_size
        return f"Loader({self.dataset!r}, batch_size={size}, shuffle={self.order.mode!r})"


def check_batch(batch_size: int | None, global_batch_size: int | None) -> None:
    """Refuse none or both of two ways to say how large a batch is."""
    if (batch_size is None) == (global_batch_size is None):
        raise OptionError(
            "give batch_size (samples on each rank) or global_batch_size (on all ranks), one "
            f"of them; got {batch_size} and {global_batch_size}"
        )


def check_counts(**counts: int | None) -> None:
    """Refuse what is given and is not at least 1."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")


def checked_tiers(tiers: Any) -> tuple[Memory | Disk, ...]:
    """Return the tiers that were asked for, or say how to ask for them."""
    several = tiers if isinstance(tiers, list | tuple) else [tiers]
    for tier in several:
        if not isinstance(tier, Memory | Disk):
            raise OptionError(
                f"tiers={tier!r}: a tier is a place and a size, such as "
                'tiers=[penstock.Memory("8GB"), penstock.Disk("/scratch", "200GB")]'
            )
    return tuple(several)


class Opened:
    """Tiers that this process has open, until nobody holds this any more."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.pid = os.getpid()
        self.close = weakref.finalize(self, _close_here, holding, self.pid)


def _close_here(holding: Holding, pid: int) -> None:
    if os.getpid() == pid:  # Else they are the parent's of a fork.
        holding.close()


def _mover(loader: weakref.ref[Loader], end_epoch: int | None) -> Callable[[Slot], None]:
    """Return what moves the loader's cursor when a batch is delivered."""

    def delivered(slot: Slot) -> None:
        owner = loader()
        if owner is not None:
            owner._cursor = slot.cursor_after
            if slot.cursor_after[0] == end_epoch:
                owner._begin_at = slot.cursor_after  # Done: the next iteration is the next epoch.

    return delivered


def _world_here() -> World:
    """Return the world of torch's process group if there is one, else what a launcher said.

    Some launchers, Lightning's own among them, name no rank in the environment, but the group knows
    it. Nothing is imported for that: without torch in this process there is no group.
    """
    if "torch.distributed" not in sys.modules:
        return World.from_env()
    world: World = importlib.import_module("penstock.torch.world").world_here()
    return world


def _ranks_a_node(world: World) -> int:
    """Return how many ranks a node has, where they are spread evenly."""
    return -(-world.num_ranks // world.num_nodes)


def _threads_for(world: World, copies_only: bool) -> int:
    """Return this rank's share of the cores, less one of many for the training loop itself.

    A few threads copy as fast as memory allows; more of them only wait for each other.
    """
    cores = len(os.sched_getaffinity(0)) // _ranks_a_node(world)
    most = _COPY_THREADS_MAX if copies_only else _THREADS_MAX
    return max(1, min(most, cores - 1 if cores >= 4 else cores))
