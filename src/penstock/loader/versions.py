"""The version of a data set that a loader reads: the same on all ranks, and changed only between
epochs.

A version never changes, so a run that stays on one version is exact. A run that wants appended
samples asks for the newest version between two epochs: the first rank to ask looks it up, and all
others take the version that it has found. A resumed run goes on with the version of its state.
"""

from __future__ import annotations

from penstock.dataset.dataset import Dataset
from penstock.engine.peers.rendezvous import Rendezvous
from penstock.errors import OptionError, PenstockError

_WAIT_S_MAX = 120.0
"""Wait for a version that another node has seen: some file systems show new files late."""
_VERSIONS_BACK_MAX = 256
"""Versions that are searched for the one of a saved state."""


def newest_for_all(dataset: Dataset, place: Rendezvous | None, key: str) -> Dataset:
    """Return the newest version that the first rank to ask under a key has found."""
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
        return None  # A view, or removed versions: the error about the state will say more.
    return None


def check_at_edge(epoch: int, position: int) -> None:
    """Refuse to change the data set inside of an epoch."""
    if position:
        raise OptionError(
            f"refresh() changes which samples there are, and this is position {position} of epoch "
            f"{epoch}; call it between epochs, when `for batch in loader` has come to its end"
        )
