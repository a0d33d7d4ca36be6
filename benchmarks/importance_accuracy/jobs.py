"""Runs as jobs: each in one of several processes that share the machine."""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.importance_accuracy.data import Images, load
from benchmarks.importance_accuracy.training import Recipe, Run, run_of
from benchmarks.samplers import source_of
from penstock.order.importance import Importance
from penstock.simulate.importance import SCORES, ImportanceSource, TrainingSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: what a process needs to know to carry it out."""

    system: str
    """A system's name, with settings after colons: `importance:floor=0.5:window=0.1`."""
    seed: int
    recipe: Recipe
    cache_share: float
    device: str
    folder: Path
    """Where the images are saved."""


def carry_out(job: Job) -> Run:
    """Train once, in a process of its own with one thread."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    images = images_in(job.folder)
    source = source_with(job, num_samples=len(images.train))
    run = run_of(source, images, job.recipe, torch.device(job.device), seed=job.seed)
    run.system = job.system
    return run


def source_with(job: Job, *, num_samples: int) -> TrainingSource:
    """The system that a job names, with its settings."""
    name, *texts = job.system.split(":")
    settings = dict(map(setting_of, texts))
    common = {
        "num_samples": num_samples,
        "cache_samples": round(job.cache_share * num_samples),
        "seed": job.seed,
    }
    if name in SCORES and settings:
        options = Importance(**{"score": SCORES[name]} | settings)
        return ImportanceSource(job.system, options, **common)
    assert not settings, f"{name} has no settings here, got {texts}"
    return source_of(name, batch_size=job.recipe.batch_size, **common)


@cache
def images_in(folder: Path) -> Images:
    return load(folder)


def setting_of(text: str) -> tuple[str, Any]:
    """Return a setting's name and value.

    >>> setting_of("floor=0.5"), setting_of("score=loss")
    (('floor', 0.5), ('score', 'loss'))
    """
    name, _, value = text.partition("=")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, value


def carried_out(jobs: Sequence[Job], num_processes: int) -> Iterator[Run]:
    """Carry jobs out, several at a time, and return each run when it ends."""
    if num_processes == 0:
        yield from map(carry_out, jobs)
        return
    # Spawned, because a forked process cannot use CUDA once its parent has.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        for done in as_completed([pool.submit(carry_out, job) for job in jobs]):
            yield done.result()
