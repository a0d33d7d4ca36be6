"""The scenes of the demo, in order."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from examples.demo.messages import DemoJob, RankDone
from examples.demo.ranks import DemoRanks
from examples.demo.shapes import CLASSES, draw_images, split
from examples.demo.stage import DemoScreen
from examples.demo.view import DemoView

from penstock.cli.opened import show_place
from penstock.dataset.dataset import Dataset
from penstock.dataset.open import open as open_dataset
from penstock.dataset.pack import PackOptions, pack
from penstock.engine.stream import make_order
from penstock.errors import WorkerError
from penstock.order import StreamHash
from penstock.units import show_bytes, show_count, show_seconds

_SEED = 7
_RANKS_AFTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is drawn and trained."""

    images: int
    size: int
    """Width and height of an image."""
    epochs: int
    global_batch_size: int
    save_every: int
    """Steps between checkpoints."""
    shard_bytes: int
    """Size of a shard; small, so that there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPaths:
    """Where the demo keeps its files."""

    folder: Path

    @property
    def images(self) -> Path:
        """One folder a class."""
        return self.folder / "images"

    @property
    def shards(self) -> Path:
        """The same, packed."""
        return self.folder / "shards"

    @property
    def log(self) -> Path:
        """What training processes print, for when one of them fails."""
        return self.folder / "scratch" / "training.log"

    def jobs(self, scale: Scale, num_ranks: int, save_every: int) -> list[DemoJob]:
        """Return what each rank is to do."""
        return [
            DemoJob(
                data=str(self.shards),
                checkpoint=str(self.folder / "checkpoint.pt"),
                save_every=save_every,
                meeting_point=str(self.folder / "scratch" / f"meeting-{num_ranks}"),
                rank=rank,
                num_ranks=num_ranks,
                epochs=scale.epochs,
                global_batch_size=scale.global_batch_size,
                seed=_SEED,
                events=-1,
            )
            for rank in range(num_ranks)
        ]


def tell(folder: Path, scale: Scale, *, is_kept: bool) -> None:
    """Tell the whole story."""
    stage, place = DemoScreen(num_scenes=5), DemoPaths(folder=folder)
    stage.screen.line(("Penstock", "bold"), "  from files to a trained network, with a crash")
    stage.screen.line()
    _draw(stage, place, scale)
    dataset = _pack(stage, place, scale)
    if not is_kept:
        # Now, while they are still in the page cache: files that have reached the disk take long to
        # remove.
        shutil.rmtree(place.images)
    training, _ = split(dataset)
    _train(stage, place, scale, training)
    delivered = _resume(stage, place, scale)
    _compare(stage, scale, training, delivered)
    _close(stage, place, is_kept=is_kept)


def _draw(stage: DemoScreen, place: DemoPaths, scale: Scale) -> None:
    began_s = time.monotonic()
    with stage.counting("drawing image") as count:
        for done in draw_images(place.images, scale.images, scale.size, _SEED):
            count(done, scale.images)
    took = show_seconds(time.monotonic() - began_s)
    stage.scene(
        "Draw",
        f"{show_count(scale.images)} JPEG files, {scale.size}×{scale.size}, "
        f"{len(CLASSES)} classes of shapes",
        (f"  {took}", "dim"),
    )


def _pack(stage: DemoScreen, place: DemoPaths, scale: Scale) -> Dataset:
    began_s = time.monotonic()
    with stage.counting("packing sample") as count:
        pack(
            place.images,
            place.shards,
            PackOptions(shard_size=scale.shard_bytes),
            report=lambda state: count(state.num_samples, scale.images),
        )
    dataset = open_dataset(place.shards)
    shards = sum(t.num_objects for p in dataset.parts for t in p.tables)
    took = show_seconds(time.monotonic() - began_s)
    stage.scene(
        "Pack",
        f"{shards} tar shards with an index, {show_bytes(dataset.size_bytes)}, still plain tar",
        (f"  {took}", "dim"),
    )
    return dataset


def _train(stage: DemoScreen, place: DemoPaths, scale: Scale, training: Dataset) -> None:
    stage.scene(
        "Train",
        f"a small network, {scale.epochs} epochs of {show_count(len(training))} images, 1 rank",
    )
    view = DemoView()
    with DemoRanks(place.jobs(scale, 1, scale.save_every), place.log) as ranks:
        with stage.showing(view) as changed:
            for event in ranks.events():
                view.add(event)
                changed()
                if view.step >= _fatal_step(view.num_steps, scale.save_every):
                    ranks.kill()
                    break
        saved = view.step - view.step % scale.save_every
        stage.note(view.summary())
        stage.note(
            ("kill -9", "bold red"), f" at step {view.step}; its last checkpoint is of step {saved}"
        )


def _fatal_step(num_steps: int, save_every: int) -> int:
    """Return a step near the middle that lies well between two checkpoints.

    >>> _fatal_step(228, 16)
    121
    """
    half = num_steps // 2
    return max(1, half - half % save_every + save_every // 2 + 1) if num_steps > 1 else 2


def _resume(stage: DemoScreen, place: DemoPaths, scale: Scale) -> StreamHash:
    stage.scene("Resume", f"as {_RANKS_AFTER} ranks: new processes that share every batch")
    view, delivered, accuracy = DemoView(), StreamHash(), 0.0
    jobs = place.jobs(scale, _RANKS_AFTER, save_every=0)
    with DemoRanks(jobs, place.log) as ranks, stage.showing(view) as changed:
        for event in ranks.events():
            view.add(event)
            changed()
            if isinstance(event, RankDone):
                part = StreamHash(total=event.hash_total, num_samples=event.hash_samples)
                delivered = delivered.merge(part)
                accuracy = accuracy if event.accuracy is None else event.accuracy
    assert view.ready is not None
    stage.note(
        f"from step {view.ready.first_step}: epoch {view.ready.epoch}, "
        f"position {show_count(view.ready.position)} of the loader's order"
    )
    stage.note(view.summary())
    stage.note(("accuracy ", ""), (f"{accuracy:.1%}", "bold green"), " on images it has never seen")
    return delivered


def _compare(stage: DemoScreen, scale: Scale, training: Dataset, delivered: StreamHash) -> None:
    promised = _promised(training, scale)
    stage.scene("Compare", "every sample, in its place, with what the seed alone promises")
    for name, found in (
        ("delivered, 1 then 2 ranks", delivered),
        ("computed from the seed", promised),
    ):
        stage.note(
            f"{name:<26}{show_count(found.num_samples):>7} samples  hash ",
            (found.hexdigest(), "bold"),
        )
    if delivered != promised:
        raise WorkerError(
            f"{delivered.num_samples} samples were delivered and {promised.num_samples} promised, "
            "and they are not the same: this is a bug in Penstock, please report it"
        )
    stage.note(("equal", "bold green"), ": nothing lost, nothing twice, nothing out of order")


def _promised(training: Dataset, scale: Scale) -> StreamHash:
    """Return the hash of an uninterrupted run, from the order and without reading a byte."""
    order = make_order(training, "global", _SEED, scale.global_batch_size)
    positions = np.arange(order.num_samples)
    promised = StreamHash()
    for epoch in range(scale.epochs):
        promised = promised.update(epoch, positions, order.ids(epoch, 0, order.num_samples))
    return promised


def _close(stage: DemoScreen, place: DemoPaths, *, is_kept: bool) -> None:
    screen = stage.screen
    screen.line()
    screen.line((f"Done in {stage.elapsed()}. ", "bold"), "Now with your own data:")
    shards = show_place(str(place.shards)) if is_kept else "shards/"
    for command, meaning in (
        ("penstock pack ~/pictures shards/", "many small files into shards"),
        (f"penstock info {shards}", "what is in there"),
        (f"penstock order {shards} --quality", "how well it is shuffled"),
        ('penstock.Loader(penstock.open("shards/"), batch_size=256)', "in Python"),
    ):
        screen.line("  ", (f"{command:<40}", "cyan"), (f"  {meaning}", "dim"))
