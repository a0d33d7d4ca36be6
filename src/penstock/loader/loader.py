"""`Loader`: from a data set to batches in the training loop.

A loader is cheap to make: no thread, file or connection exists before the first iteration.
`iter(loader)` starts all of them, and with `peers=True` waits for the other nodes.
One iteration goes through `epochs` epochs; the next one goes on with the epochs after them. If a
loop is left early, the next iteration begins the same epochs again, as torch's DataLoader does; to
go on from inside an epoch, use `state_dict`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import xxhash

from penstock.arguments import count_of
from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.engine.build import StreamSpan
from penstock.engine.convert import converter
from penstock.engine.decode import Collate, Transform
from penstock.engine.draw_summary import DrawSummary
from penstock.engine.engine import Engine, RunStart
from penstock.engine.job import BatchSlot
from penstock.engine.messages import EngineReport
from penstock.engine.opening import refuse_workers, rendezvous_for
from penstock.engine.options import LoaderOptions
from penstock.engine.peers.runs import run_name
from penstock.engine.reads import is_local
from penstock.engine.stats import ClusterStats, DeliveryCounters, EngineStats, Stats
from penstock.engine.stream import stream_of
from penstock.errors import OptionError
from penstock.loader.choice import WorkerChoice, choose_workers, facts_of
from penstock.loader.engine_client import EngineClient
from penstock.loader.engine_run import EngineRun
from penstock.loader.importance import LoaderImportance
from penstock.loader.iteration import BatchRun, Iteration, IterationRecording, ThreadedRun
from penstock.loader.least import least_bytes
from penstock.loader.live import open_metrics
from penstock.loader.recording import record_end, record_start, recorded_of, recorder_for
from penstock.loader.stages import StagedEngineRun, StagedIteration, StagedThreadedRun
from penstock.loader.versions import check_at_edge, newest_for_all, version_with
from penstock.machine import Machine, default_machine_path, load_machine
from penstock.order import Cursor
from penstock.order.importance import Importance, ImportanceOrder
from penstock.storage.tier_sizes import Disk, Memory
from penstock.trace import Recorder
from penstock.trace.windows import ResidentWindows, window_asked_for
from penstock.world import World

_log = logging.getLogger("penstock.loader")


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
            are empty, global in all later ones) or None (as stored). The default is "global", and
            an error where that would read the blocks of a format over and over. True is the
            default, False None. `penstock.Importance(…)` draws hard samples more often; it needs
            `loader.observe`.
        drop_last: leave out an incomplete last batch; else it is filled up, and `batch.mask` says
            with what.
        world: who takes part; by default torch's process group if there is one, else what
            torchrun, Slurm or MPI say when iteration begins.
        transform: called with each decoded sample, and with a random generator if it takes two
            arguments.
        collate: called with a list of samples, instead of joining their fields.
        pad: fields whose ragged arrays become one array, with the value to fill up with.
        workers: where batches are made. "processes": by an engine and worker processes of their
            own, which leave this process to the training loop; a number says how many workers.
            "here": in this process, by threads, for debuggers and tiny data. "auto" chooses;
            `print(loader)` says what, and why.
        threads: how many work on samples with `workers="here"`, and how many copy rows or columns
            of remote data in an engine if there is no transform; by default at most this rank's
            share of the cores.
        tiers: memory and disk of this node that keep what was read, fastest first:
            `[penstock.Memory("8GB"), penstock.Disk("/scratch", "200GB")]`. All ranks and all jobs
            on the node share them.
        peers: let the nodes of the job use each other's tiers as one cache; each byte then comes
            from the store once. A text names where they meet, if not in torch's own store: a folder
            or a store that all can write to.
        assignment: "fixed" (each rank a run of the global batch, as DistributedSampler) or
            "locality" (samples go to the node that holds them; the global batch stays the same).
        look_ahead: bytes of batches made ahead of the training loop.
        output: "torch", "numpy", or "auto" for torch where it is installed.
        trace: a folder to record the run in; `penstock report` and `penstock export` read it.
    """

    _moves: Callable[[BatchSlot], None] | None = None
    """Moves the cursor behind a batch; only the latest iteration may."""
    _chosen_by = 0
    """The process that has decided where batches are made: after a fork, the child decides anew."""
    is_inner = False
    """Whether another loader stands between this one and the training loop."""
    _windows: ResidentWindows | None = None
    """The windows of a differential run, kept from one iteration to the next."""
    _end_metrics: Callable[[], Any] | None = None
    """Ends the metrics of batches that are made in this process."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        epochs: int | None = 1,
        seed: int = 0,
        shuffle: Importance
        | Literal["default", "global", "blocks", "blocks-first"]
        | bool
        | None = "default",
        drop_last: bool = False,
        world: World | None = None,
        transform: Transform | None = None,
        collate: Collate | None = None,
        pad: Mapping[str, Any] | None = None,
        workers: Literal["auto", "here", "processes"] | int = "auto",
        threads: int | None = None,
        tiers: Sequence[Memory | Disk] = (),
        peers: bool | str | os.PathLike[str] = False,
        assignment: Literal["fixed", "locality"] = "fixed",
        look_ahead: int | str = "512MB",
        output: Literal["auto", "torch", "numpy"] = "auto",
        trace: str | Path | None = None,
    ) -> None:
        self._take(
            LoaderOptions(
                dataset=dataset,
                batch_size=batch_size,
                global_batch_size=global_batch_size,
                epochs=epochs,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                world=world,
                transform=transform,
                collate=collate,
                pad=pad,
                workers=workers,
                threads=threads,
                tiers=tiers,
                peers=peers,
                assignment=assignment,
                look_ahead=look_ahead,
                output=output,
                trace=trace,
            )
        )
        self._counters = DeliveryCounters()
        self._begun_before = EngineStats()
        """The counts of engines that have read earlier versions of the data set."""
        self._cursor = self._begin_at = (0, 0)
        self._current: weakref.ref[Iteration] | None = None

    def _take(self, options: LoaderOptions) -> None:
        """Use these options from the next iteration on."""
        self._options = options
        self.dataset = options.dataset
        self.batch_size = options.batch_size
        self.global_batch_size = options.global_batch_size
        self.epochs = options.epochs
        self.seed = options.seed
        self.drop_last = options.drop_last
        self.order = options.order
        self.importance: LoaderImportance | None = None
        """Scores of samples, with `shuffle=penstock.Importance(…)`."""
        if isinstance(options.order, ImportanceOrder):
            self.importance = LoaderImportance(options.order, options.meets_at)
        self._engine: Engine | None = None
        self._client: EngineClient | None = None
        self._choice: WorkerChoice | None = None

    # -- where the stream stands -------------------------------------------------------------

    @property
    def world(self) -> World:
        """The world of this loader; read from the environment when none was given."""
        return self._options.world or _world_here()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._cursor[0]

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("a loader with epochs=None never ends, it has no length")
        return self.epochs * stream_of(self._options, self.world).steps().steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the stream behind the last delivered batch."""
        epoch, position = self._cursor
        cursor = Cursor.at(
            self.order, fingerprint=self.dataset.fingerprint, epoch=epoch, position=position
        )
        state: dict[str, Any] = dict(cursor.to_state())
        if self.importance is not None:
            state["importance"] = self.importance.to_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place at the next `iter`, also on another number of ranks.

        If the data set has newer versions since, the loader reads the version of the state.
        """
        options = self._options
        saved = state.get("fingerprint") if isinstance(state, Mapping) else None
        if isinstance(self.dataset, Dataset) and isinstance(saved, str):
            found = version_with(self.dataset, saved)
            if found is not None and found is not self.dataset:
                options = replace(options, dataset=found)
        fingerprint = options.dataset.fingerprint
        cursor = Cursor.from_state(state, order=options.order, fingerprint=fingerprint)
        scores = None
        if isinstance(options.order, ImportanceOrder):
            scores = LoaderImportance.saved(options.order, state.get("importance"))
        # Only now, so that a state that is refused changes nothing.
        self._move_to(options)
        self._end_iteration()
        if self.importance is not None and scores is not None:
            self.importance.load(scores)
        self._cursor = self._begin_at = (cursor.epoch, cursor.position)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at an epoch; nothing changes if it would anyway."""
        epoch = count_of("epoch", epoch, least=0)
        if epoch != self._begin_at[0]:
            self._cursor = self._begin_at = (epoch, 0)

    def refresh(self) -> bool:
        """Move to the newest version of the data set; return whether there is a newer one.

        Call it between epochs, on all ranks. All ranks move to the same version: the one that the
        first of them has found.
        """
        check_at_edge(*self._cursor)
        if not isinstance(self.dataset, Dataset):
            raise OptionError("a mixture stays as it is; make a new one from `dataset.latest()`")
        self._end_iteration()
        self._begin_at = self._cursor
        place, key = None, ""
        if self.world.num_ranks > 1:
            place = rendezvous_for(self._options.meets_at, self.world)
            name = xxhash.xxh3_64_hexdigest(self.dataset.uri.encode())
            key = f"{self._run_key()}/version/{name}/{self._cursor[0]}"
        found = newest_for_all(self.dataset, place, key)
        if found is self.dataset:
            return False
        if self.importance is not None and self.importance.num_observed:
            _log.warning("the scores of samples belong to the version before, and begin anew")
        self._move_to(replace(self._options, dataset=found))
        return True

    def _run_key(self) -> str:
        """Return the prefix of the keys of this run."""
        engine = self._client or self._engine
        run_id = None if engine is None else engine.run_id
        return run_id or run_name()

    def _move_to(self, options: LoaderOptions) -> None:
        """Move to these options if they name another version of the data set."""
        if options.dataset is self.dataset:
            return
        self._end_iteration()
        self._begun_before += self._close_engine()
        self._take(options)

    def observe(self, batch: Any, losses: Any) -> None:
        """Report the losses of a batch's samples, for `shuffle=penstock.Importance(…)`.

        Call it once for each batch, on every rank, with one loss a sample (`reduction="none"`) and
        without the weights. Tensors on a GPU are not waited for.
        """
        if self.importance is None:
            raise OptionError(
                "observe is for importance sampling; make the loader with "
                "shuffle=penstock.Importance()"
            )
        self.importance.observe(batch, losses)

    # -- iterating ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.part(0, 1)

    def part(self, first: int, every: int) -> Iterator[Any]:
        """Iterate over every n-th batch from `first` on; other processes make the others."""
        return self._begin((count_of("first", first, least=0), count_of("every", every)))

    def stages(self, *, only_asked: bool = False) -> StagedIteration:
        """Iterate in stages, for a step in which fetching and decoding are lanes of their own.

        With `only_asked`, nothing is read for batches that nobody has asked for.
        """
        return StagedIteration(self._begin((0, 1), only_asked))

    def _begin(self, part: tuple[int, int], only_asked: bool | None = None) -> Iteration:
        """Begin an iteration; it is one in stages if `only_asked` is given."""
        self._end_iteration()
        world = self.world
        epoch, position = self._begin_at
        if stream_of(self._options, world).steps(position).num_steps == 0:
            # Resumed where no full batch is left, because batches have another size now.
            self._begin_at = (epoch + 1, 0)
        self._cursor = self._begin_at
        epoch = self._begin_at[0]
        end_epoch = None if self.epochs is None else (epoch // self.epochs + 1) * self.epochs
        span = StreamSpan(start=self._begin_at, end_epoch=end_epoch, part=part)
        if self.importance is not None:
            total = stream_of(self._options, world).global_batch_size
            self.importance.begin(span.start, world, total, part)
            self.importance.seen = _cluster_stats_of(weakref.ref(self))
        # Before the run: its threads record with the same recorder.
        recorder = recorder_for(self._options, world)
        run, keeps_alive = self._run(span, world, only_asked)
        self._moves = _moves_of(weakref.ref(self), end_epoch)
        if recorder is not None:
            record_start(recorder, self._options, world, str(self._choice))
        iteration = Iteration(
            run,
            self._counters,
            converter(self._options.output),
            delivered=self._moves,
            recorded=self._recorded(recorder, is_staged=only_asked is not None),
            windows=self._differential() if only_asked is None else None,
            keeps_alive=keeps_alive,
        )
        self._current = weakref.ref(iteration)
        return iteration

    def _differential(self) -> ResidentWindows | None:
        """Return the windows of a differential run, if the environment asks for one."""
        window = window_asked_for()
        if window == 0:
            return None
        if self.importance is not None:
            raise OptionError(
                "PENSTOCK_DIFFERENTIAL hands batches out again, and importance sampling expects "
                "the losses of each batch once; unset it, or trace with another shuffle="
            )
        if self._windows is None or self._windows.window != window:
            self._windows = ResidentWindows(window)
        return self._windows

    def _recorded(self, recorder: Recorder | None, *, is_staged: bool) -> IterationRecording | None:
        """Return how an iteration is recorded; None inside of somebody else's loader."""
        if recorder is None or self.is_inner or recorder.role != "train":
            return None
        # In stages, the threads of lanes ask; what they do between two batches is no step.
        return recorded_of(self, recorder, is_loop=not is_staged)

    def _run(
        self, span: StreamSpan, world: World, only_asked: bool | None
    ) -> tuple[BatchRun, object]:
        """Return what makes the batches of an iteration, and an object that must live as long."""
        options = self._options
        if options.peers:
            refuse_workers()
        start = RunStart(world=world, span=span)
        importance = self.importance
        scores = None if importance is None else importance.scores
        if self._choose().uses_engine_process:
            client = self._client
            assert client is not None
            if only_asked is None:
                run = EngineRun(client, start, scores)
            else:
                run = StagedEngineRun(client, start, scores, only_asked=only_asked)
            if importance is not None:
                importance.forward_to(run.observed)
            return run, client
        if self._engine is None:
            self._engine = Engine(options)
        engine = self._engine
        if self._end_metrics is None:
            self._end_metrics = open_metrics(self, world)
        runner = engine.begin(replace(start, scores=None if scores is None else scores()))
        if importance is not None:
            importance.forward_to(engine.observed)
        if only_asked is None:
            return ThreadedRun(runner), engine.opened_tiers
        return StagedThreadedRun(runner, only_asked=only_asked), engine.opened_tiers

    def _choose(self) -> WorkerChoice:
        """Decide where batches are made, once for a data set."""
        if self._choice is None or self._chosen_by != os.getpid():
            self._chosen_by = os.getpid()
            # After a fork, these belong to the parent.
            self._engine = self._client = self._end_metrics = None
            facts, payload = facts_of(self._options)
            self._choice = choose_workers(facts)
            if self._choice.uses_engine_process:
                self._client = EngineClient(self._options, payload)
            elif facts.unpicklable and self._options.workers == "auto":
                _log.warning("batches are made %s", self._choice)
        return self._choice

    def machine(self) -> Machine:
        """Return the machine that `penstock probe` measured, refined by this loader's reads."""
        found = None if self._client is None else self._client.machine()
        live = None if self._engine is None else self._engine.live_rates()
        if found is None and live is not None:
            found = live.machine()
        return load_machine(default_machine_path()) if found is None else found

    # -- closing -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the running iteration with all its threads and processes, and close the tiers.

        A summary of the run goes to the log `penstock.loader` (level INFO).
        """
        if self._current is not None:
            stats = self.stats()
            _log.info("%s", stats)
            recorder = recorder_for(self._options, self.world)
            if recorder is not None:
                record_end(recorder, stats)
        self._end_iteration()
        self._close_engine()

    def _close_engine(self) -> EngineStats:
        """End engine and workers; return their counts."""
        if self._end_metrics is not None:
            self._end_metrics()
            self._end_metrics = None
        for engine in (self._client, self._engine):
            if engine is not None:
                engine.close()
        return self._counted()

    def _counted(self) -> EngineStats:
        counted = EngineStats()
        if self._client is not None:
            counted += self._client.counted
        if self._engine is not None:
            counted += self._engine.counters.counted()
        return counted

    def _end_iteration(self) -> None:
        iteration = self._current() if self._current is not None else None
        self._current = self._moves = None
        if iteration is not None and iteration.is_open:
            iteration.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has the same options and place, and makes batches itself."""
        state = {**self.__dict__, "_engine": None, "_client": None, "_choice": None}
        more = {"_windows": None, "_end_metrics": None}
        return {**state, "_current": None, "_moves": None, **more}

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
        """Return the counts since the loader was made."""
        iteration = self._current() if self._current is not None else None
        told = self._told()
        seen, here = told.seen, self._counters
        counted = self._begun_before + self._counted()
        draws: DrawSummary | None = None
        about_draws: tuple[str, ...] = ()
        if self.importance is not None and seen.draws is not None:
            draws, about_draws = self.importance.summary(seen.draws)
        return Stats(
            sources=counted.sources,
            decode_s=counted.decode_s,
            samples=here.samples,
            batches=here.batches,
            stall_s=here.stall_s,
            hand_over_s=here.hand_over_s,
            cpu_here_s=here.cpu_here_s + (iteration.cpu_s if iteration is not None else 0.0),
            sent_bytes=here.sent_bytes + (iteration.sent_bytes if iteration is not None else 0),
            elapsed_s=here.elapsed_s + (iteration.running_s if iteration is not None else 0.0),
            workers="" if self._choice is None else str(self._choice),
            tiers=seen.tiers,
            bound_bytes=self._bound_bytes(seen),
            epochs=self._progress(),
            peers=seen.peers,
            events=(*seen.events, *told.events),
            memory=told.memory,
            draws=draws,
            about_draws=about_draws,
            cache_hits=seen.cache_hits,
        )

    def _told(self) -> EngineReport:
        """Return the state of tiers, other nodes and our processes."""
        if self._client is not None:
            return self._client.told()
        seen = ClusterStats() if self._engine is None else self._engine.seen()
        return EngineReport(seen=seen, counted=EngineStats(), events=())

    def _progress(self) -> float:
        """Return the epochs that were delivered, in samples of the whole world."""
        return self._counters.samples * self.world.num_ranks / self.order.num_samples

    def _bound_bytes(self, seen: ClusterStats) -> int | None:
        """Return the least that this rank's part of the job could have read from stores."""
        if not isinstance(self.dataset, Dataset) or self.dataset.selection is not None:
            return None  # An epoch does not use every sample once.
        if self.importance is not None:
            return None
        if not self._options.tiers and all(is_local(b) for b in self.dataset.bound):
            return None  # Local data is not copied from anywhere.
        world, progress = self.world, self._progress()
        first, later = least_bytes(
            self.dataset,
            self.order,
            seen.kept,
            warm_bytes=seen.warm_bytes or 0,
            stage_bytes=self._options.stage_bytes * world.num_ranks,
            is_alone=world.num_ranks == world.num_nodes,
        )
        least = min(1.0, progress) * first + max(0.0, progress - 1) * later
        return round(least / world.num_ranks)

    def __repr__(self) -> str:
        size = f"global_batch_size={self.global_batch_size}"
        if self.batch_size is not None:
            size = f"batch_size={self.batch_size}"
        return (
            f"Loader({self.dataset!r}, {size}, epochs={self.epochs}, seed={self.seed}, "
            f"shuffle={self._options.shuffle!r}, at epoch {self._cursor[0]}, "
            f"position {self._cursor[1]:,} of {self.order.num_samples:,}, batches made "
            f"{self._choice_shown()})"
        )

    def _choice_shown(self) -> str:
        """Return where batches are made, or would be if an iteration began now."""
        if self._choice is not None:
            return str(self._choice)
        try:
            return str(choose_workers(facts_of(self._options)[0]))
        except OptionError as error:
            return f"nowhere: {error}"


def _cluster_stats_of(loader: weakref.ref[Loader]) -> Callable[[], ClusterStats]:
    """Return a function that asks a loader for its engine's state, without keeping the loader."""

    def seen() -> ClusterStats:
        owner = loader()
        return ClusterStats() if owner is None else owner._told().seen

    return seen


def _moves_of(loader: weakref.ref[Loader], end_epoch: int | None) -> Callable[[BatchSlot], None]:
    """Return the function that moves the loader's cursor when a batch is delivered."""

    def delivered(slot: BatchSlot) -> None:
        owner = loader()
        if owner is not None and owner._moves is delivered:
            owner._cursor = slot.cursor_after
            if owner.importance is not None:
                owner.importance.delivered(slot)
            if slot.cursor_after[0] == end_epoch:
                owner._begin_at = slot.cursor_after  # Done: the next iteration is the next epoch.

    return delivered


def _world_here() -> World:
    """Return the world of torch's process group if there is one, else that of the environment.

    Some launchers, such as Lightning's own, name no rank in the environment, but the group knows
    it. This never imports torch: without torch in this process there is no group.
    """
    if "torch.distributed" not in sys.modules:
        return World.from_env()
    world: World = importlib.import_module("penstock.loader.torch.world").world_here()
    return world
