"""Hints for names that do not exist: what there is that looks like them."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.storage.base import Store
from penstock.storage.remote import RemoteStore
from penstock.storage.retry import RetryingStore
from penstock.storage.uris import ParsedUri

_NAMES_MAX = 2000
"""Names looked at."""
_HINTS_MAX = 3
"""Names shown."""


def near_names(place: ParsedUri, store_at: Callable[[ParsedUri], Store]) -> list[str]:
    """Return existing names beside a missing one, best first; costs one request at most."""
    path = place.path.rstrip("/")
    folder, _, wanted = path.rpartition("/")
    below = f"{folder}/" if folder or place.scheme == "file" else ""
    base = replace(place, path="" if place.scheme == "memory" else below)
    try:
        names = _names(store_at(base), below if place.scheme == "memory" else "")
    except PenstockError:
        return []  # the hint is a courtesy; the error it would decorate matters more
    close = difflib.get_close_matches(wanted, names, _HINTS_MAX, cutoff=0.5)
    return [f"{base.uri}{name}" for name in close]


def _names(store: Store, prefix: str) -> list[str]:
    """Return the first parts of keys below a prefix, each once."""
    inner = store.inner if isinstance(store, RetryingStore) else store
    if isinstance(inner, RemoteStore):
        keys = inner.peek(prefix)
    else:
        keys = tuple(info.key for info in itertools.islice(inner.list(prefix), _NAMES_MAX))
    return list(dict.fromkeys(key[len(prefix) :].partition("/")[0] for key in keys))
