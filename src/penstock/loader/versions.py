"""Which version of a data set a loader reads: the same on all ranks, and only ever changed between
epochs.

A version never changes, so a run that stays on its own is exact. One that wants what was appended
meanwhile asks for it at an epoch's edge: the first rank to get there looks, all others take what it
found. A run that is resumed goes on with the version that its state was saved with.
"""

from __future__ import annotations

from penstock.dataset.dataset import Dataset
from penstock.engine.peers.rendezvous import Rendezvous
from penstock.errors import OptionError, PenstockError

_WAIT_S_MAX = 120.0
"""For a version that another node has seen, on file systems that show new files late."""
_VERSIONS_BACK_MAX = 256
"""Versions that are looked through for the one of a saved state."""


def newest_for_all(dataset: Dataset, place: Rendezvous | None, key: str) -> Dataset:
    """Return the newest version, as whoever asked first under a key has found it."""
    found = dataset.latest()
    if place is None:
        return found
    agreed = int(place.put_once(key, str(found.version).encode()))
    return dataset.at_version(agreed, wait_s=_WAIT_S_MAX)


def version_with(dataset: Dataset, fingerprint: str) -> Dataset | None:
    """Return the version of a data set that has a fingerprint, if it can be found."""
    if dataset.fingerprint == fingerprint:
        return dataset
    try:
        newest = dataset.latest().version
        for version in range(newest, max(0, newest - _VERSIONS_BACK_MAX), -1):
            assert dataset.origin is not None
            manifest = dataset.origin.catalog.read(version)
            if manifest is not None and manifest.fingerprint == fingerprint:
                return dataset.at_version(version)
    except PenstockError:
        return None  # A view, or versions that were removed: the error about the state says more.
    return None


def check_at_edge(epoch: int, position: int) -> None:
    """Refuse to change the data set inside of an epoch."""
    if position:
        raise OptionError(
            f"refresh() changes which samples there are, and this is position {position} of epoch "
            f"{epoch}; call it between epochs, when `for batch in loader` has come to its end"
        )
