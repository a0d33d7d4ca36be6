"""Finds the objects that a user names: a folder, prefix, object, glob, braces, or a list of these.

Each name becomes a `_LocationSearch`, a base place and the objects found below it. The searches of
one container are then joined under their common folder. Listings leave hidden names out, but a
hidden object can be named in full.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import NotFoundError, OptionError, PenstockError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder import FolderStore
from penstock.storage.keys import is_hidden
from penstock.storage.memory import MemoryStore
from penstock.storage.options import StoreOptions
from penstock.storage.patterns import (
    EVERYTHING,
    expand_braces,
    fixed_folder,
    glob_regex,
    has_glob,
)
from penstock.storage.pool import ReadPool
from penstock.storage.remote import RemoteStore
from penstock.storage.retry import RetryingStore, RetryPolicy
from penstock.storage.uris import ParsedUri, split_uri

_CHECKS_AT_ONCE = 16
"""Requests at once if objects are named one by one."""
_NAMES_MAX = 2000
"""Names that are compared with one that does not exist."""
_HINTS_MAX = 3
"""Names that the message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Objects, and the store whose keys they have."""

    store: Store
    """Rooted at the folder that all objects share."""
    objects: list[ObjectInfo]
    """Sorted by key unless the user gave an order (braces, list)."""
    names: tuple[str, ...]
    """What the user named, in order: `object:`, `folder:` or `glob:` and a name below the root.
    Relative to the root, so that a copy of the folder has the same names."""

    @property
    def is_everything(self) -> bool:
        """Whether these are all objects below the root, as for a folder or prefix."""
        return self.names == EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocationSearch:
    """Objects below one place; its path is empty or ends with `/`, keys are relative to it."""

    base: ParsedUri
    objects: list[ObjectInfo]
    kind: str
    """One of `object`, `folder`, `glob`."""
    name: str
    """What the user named, relative to the base."""


def open_store(uri: str | os.PathLike[str], options: StoreOptions | None = None) -> Store:
    """Return the store whose root is a folder, bucket, prefix or address; opens nothing yet."""
    return _store_at(split_uri(os.fspath(uri)), options or StoreOptions())


def _store_at(place: ParsedUri, options: StoreOptions) -> Store:
    if place.scheme == "file":
        return FolderStore(place.path)
    if place.scheme == "memory":
        if place.path:
            raise OptionError(f"{place.uri}: a memory store has no folders; use memory://name/")
        return MemoryStore(place.container)
    policy = RetryPolicy(deadline_s=options.deadline_s)
    return RetryingStore(RemoteStore(place.uri, options), policy)


def resolve(
    uri: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: StoreOptions | None = None,
) -> Located:
    """Return the objects that a uri, a pattern or a list of them stands for."""
    options = options or StoreOptions()
    texts = _texts(uri)
    finds = _finds(texts, options)
    base = _common_base(finds)
    inside = [find.base.path[len(base.path) :] for find in finds]
    names = [f"{f.kind}:{below}{f.name}" for f, below in zip(finds, inside, strict=True)]
    return Located(
        store=_store_at(base, options),
        objects=_distinct(_rekeyed(find, base) for find in finds),
        names=tuple(dict.fromkeys(names)),
    )


def _texts(uri: object) -> list[str]:
    """Return the names that the user gave; raise an error for values that are no names."""
    is_one = isinstance(uri, str | bytes | os.PathLike) or not isinstance(uri, Iterable)
    items: list[Any] = [uri] if is_one else list(uri)  # type: ignore[call-overload]
    if not items:
        raise OptionError("an empty list names no objects; pass at least one path or uri")
    for item in items:
        if not isinstance(item, str | os.PathLike) or not isinstance(os.fspath(item), str):
            raise OptionError(
                f"{item!r} is not a path or uri; pass a str, a Path or a list of them, such as "
                "'s3://bucket/train/'"
            )
    return [os.fspath(item) for item in items]


def _finds(texts: list[str], options: StoreOptions) -> list[_LocationSearch]:
    """Return a search for each name; several names are looked up in parallel."""
    names = [name for text in texts for name in _expanded(text)]
    if len(names) == 1:
        return [_find(names[0], options)]
    found: dict[int, _LocationSearch] = {}
    with ReadPool(min(_CHECKS_AT_ONCE, len(names))) as pool:
        numbered = pool.map_unordered(
            lambda item: (item[0], _find(item[1], options)), enumerate(names)
        )
        found.update(numbered)
    return [found[number] for number in range(len(names))]


def _expanded(text: str) -> list[str]:
    is_literal = "{" not in text or ("://" not in text and os.path.exists(text))  # noqa: PTH110
    return [text] if is_literal else expand_braces(text)


def _find(name: str, options: StoreOptions) -> _LocationSearch:
    place = split_uri(name)
    is_there = place.scheme == "file" and os.path.exists(place.path)  # noqa: PTH110
    if has_glob(place.path) and not is_there:
        return _find_glob(place, options)
    if place.scheme in ("http", "https"):
        return _find_http(place, options)
    found = None if place.path.endswith("/") or not place.path else _find_object(place, options)
    return found or _find_folder(place, options)


def _find_object(place: ParsedUri, options: StoreOptions) -> _LocationSearch | None:
    folder, _, name = place.path.rpartition("/")
    base = replace(place, path=f"{folder}/" if folder or place.scheme == "file" else "")
    if place.scheme == "memory":
        base, name = replace(place, path=""), place.path
    try:
        info = _store_at(base, options).info(name)
    except NotFoundError:
        return None
    return _LocationSearch(base=base, objects=[info], kind="object", name=name)


def _find_folder(place: ParsedUri, options: StoreOptions) -> _LocationSearch:
    below = place.path if place.path.endswith("/") or not place.path else f"{place.path}/"
    base = replace(place, path=below)
    if place.scheme == "memory":
        root = replace(place, path="")
        listed = _visible(_store_at(root, options), below)
        found = _LocationSearch(base=root, objects=listed, kind="folder", name=below)
    else:
        objects = _visible(_store_at(base, options), "")
        found = _LocationSearch(base=base, objects=objects, kind="folder", name="")
    if not found.objects:
        raise _missing(place, options)
    return found


def _visible(store: Store, prefix: str) -> list[ObjectInfo]:
    return [info for info in store.list(prefix) if not is_hidden(info.key[len(prefix) :])]


def _find_glob(place: ParsedUri, options: StoreOptions) -> _LocationSearch:
    if place.scheme in ("http", "https"):
        raise OptionError(
            f"{place.uri}: plain http cannot be listed, so wildcards find nothing; write braces, "
            "for example shard-{000..127}.tar, or pass a list"
        )
    folder = "" if place.scheme == "memory" else fixed_folder(place.path)
    base = replace(place, path=folder)
    pattern = glob_regex(place.path[len(folder) :])
    objects = [
        info for info in _visible(_store_at(base, options), "") if pattern.fullmatch(info.key)
    ]
    if not objects:
        raise _missing(place, options)
    return _LocationSearch(base=base, objects=objects, kind="glob", name=place.path[len(folder) :])


def _find_http(place: ParsedUri, options: StoreOptions) -> _LocationSearch:
    if place.path.endswith("/") or not place.path:
        raise OptionError(
            f"{place.uri} is a prefix, and plain http cannot be listed; name the objects, "
            f"for example {place.uri}shard-{{000..127}}.tar, or pass a list"
        )
    found = _find_object(place, options)
    if found is None:
        raise NotFoundError(f"{place.uri} does not exist (404); check the name", uri=place.uri)
    return found


def _missing(place: ParsedUri, options: StoreOptions) -> NotFoundError:
    if place.scheme == "file" and os.path.isdir(place.path):  # noqa: PTH112
        hidden = any(True for _ in FolderStore(place.path).list())
        what = "holds only hidden names (.x, _SUCCESS), no data" if hidden else "is an empty folder"
        return NotFoundError(
            f"{place.uri} {what}; put data there, or check the name", uri=place.uri
        )
    near = _near_names(place, lambda root: _store_at(root, options))
    hint = f"; near it there is {', '.join(near)}" if near else "; check the name"
    what = "no object matches" if has_glob(place.path) else "there is no object and no folder"
    return NotFoundError(f"{what} {place.uri}{hint}", uri=place.uri)


def _near_names(place: ParsedUri, store_at: Callable[[ParsedUri], Store]) -> list[str]:
    """Return existing names beside a missing one, best first; costs one request at most."""
    path = place.path.rstrip("/")
    folder, _, wanted = path.rpartition("/")
    below = f"{folder}/" if folder or place.scheme == "file" else ""
    base = replace(place, path="" if place.scheme == "memory" else below)
    try:
        names = _names(store_at(base), below if place.scheme == "memory" else "")
    except PenstockError:
        return []  # the caller is about to raise a better error; the hint is optional
    close = difflib.get_close_matches(wanted, names, _HINTS_MAX, cutoff=0.5)
    return [f"{base.uri}{name}" for name in close]


def _names(store: Store, prefix: str) -> list[str]:
    """Return the first parts of keys below a prefix, each once."""
    inner = store.inner if isinstance(store, RetryingStore) else store
    listed = inner.peek(prefix) if isinstance(inner, RemoteStore) else inner.list(prefix)
    keys = [info.key[len(prefix) :] for info in itertools.islice(listed, _NAMES_MAX)]
    return list(dict.fromkeys(key.partition("/")[0] for key in keys))


def _common_base(finds: list[_LocationSearch]) -> ParsedUri:
    first = finds[0].base
    for find in finds:
        if find.base.container_uri != first.container_uri:
            raise OptionError(
                f"{first.container_uri} and {find.base.container_uri} are different stores; one "
                "data set lies in one store: copy one of them, or open each and mix them"
            )
    shared = first.path
    while not all(find.base.path.startswith(shared) for find in finds):
        shared = shared[: shared.rstrip("/").rfind("/") + 1]
    return replace(first, path=shared)


def _rekeyed(find: _LocationSearch, base: ParsedUri) -> list[ObjectInfo]:
    inside = find.base.path[len(base.path) :]
    return [replace(info, key=inside + info.key) for info in find.objects]


def _distinct(groups: Iterable[list[ObjectInfo]]) -> list[ObjectInfo]:
    """Return the objects in the given order, each once."""
    return list({info.key: info for group in groups for info in group}.values())
