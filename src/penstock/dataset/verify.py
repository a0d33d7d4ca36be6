"""Verifying a data set: everything that can be checked, checked, and all that is wrong named.

First the index itself: do its columns give the fingerprint that it says, do all samples lie inside
of their objects? Then the objects: are they there, of the size and with the mark that was indexed?
Then every sample is read, compared with its checksum where the index has one (those of `Writer`
and `pack` do), unpacked and decoded. The first problem stops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.open import Uri, open_unverified
from penstock.dataset.verify_index import (
    AsFound,
    Objects,
    check_objects,
    check_part,
    find_objects,
    is_sound,
)
from penstock.dataset.verify_report import (
    Problem,
    Report,
    Tally,
    VerifyProgress,
    VerifyReport,
)
from penstock.dataset.verify_samples import Checks, SampleRun, Structure, runs_of, structures_of
from penstock.errors import OptionError
from penstock.storage.base import Store
from penstock.storage.options import StoreOptions
from penstock.storage.pool import ReadPool

_THREADS_LOCAL = 4
_THREADS_REMOTE = 16
_READERS = 16

__all__ = ["Problem", "VerifyProgress", "VerifyReport", "verify"]


def verify(
    target: Uri | Dataset,
    *,
    decode: bool = True,
    problems_max: int = 100,
    version: int | None = None,
    store: StoreOptions | None = None,
    report: Report | None = None,
    **options: Any,
) -> VerifyReport:
    """Check a data set and return all that is wrong with it.

    Args:
        target: what `penstock.open` takes, or a data set that is open; a view is checked whole.
        decode: decode every field of every sample too.
        problems_max: how many problems to keep; all are counted.
        version: which version to check; the latest when not given.
        store: how it is reached, where the environment does not say.
        report: called with progress.
        options: as for `penstock.open`.
    """
    if problems_max < 1:
        raise OptionError(f"problems_max must be at least 1, got {problems_max}")
    dataset = target if isinstance(target, Dataset) else None
    if dataset is None:
        assert not isinstance(target, Dataset)
        dataset = open_unverified(target, version=version, store=store, **options)
    tally = Tally(problems_max=problems_max)
    objects = find_objects(dataset.store, dataset.parts)
    for bound in dataset.bound:
        tally.add_problems(check_part(bound))
        if is_sound(bound):
            tally.add_problems(check_objects(bound, objects))
    sound = [bound for bound in dataset.bound if is_sound(bound)]
    _check_all(dataset, sound, objects, tally, decode=decode, report=report)
    return tally.report(sum(t.num_objects for p in dataset.parts for t in p.tables))


def _check_all(
    dataset: Dataset,
    sound: Sequence[BoundPart],
    objects: Objects,
    tally: Tally,
    *,
    decode: bool,
    report: Report | None,
) -> None:
    work: list[SampleRun | Structure] = []
    for each in sound:
        bound = replace(each, store=cast(Store, AsFound(each.store, objects)))
        # Objects and samples in the order of samples, so that progress is even from the beginning.
        pieces: list[SampleRun | Structure] = [*structures_of(bound, objects), *runs_of(bound)]
        work += sorted(pieces, key=lambda piece: piece.first)
    local = dataset.store.source in ("folder", "memory")
    num_threads = _THREADS_LOCAL if local else _THREADS_REMOTE
    num_samples, samples_done = sum(piece.num_samples for piece in work), 0
    # Two pools, because checks wait for reads: in one pool they could take all threads and wait for
    # ever.
    with ReadPool(_READERS) as readers, ReadPool(num_threads) as pool:
        checks = Checks(objects=objects, readers=readers, decode=decode)
        for piece, findings in pool.map_unordered(lambda w: (w, w.check(checks)), work):
            tally.add(findings)
            samples_done += piece.num_samples
            if report is not None:
                report(
                    VerifyProgress(
                        num_samples=num_samples,
                        samples_done=samples_done,
                        size_bytes=tally.size_bytes,
                        num_problems=tally.num_problems,
                    )
                )
