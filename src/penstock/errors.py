"""Every error Penstock raises, in one place.

A message says what failed, the numbers or names that show it, and the way out. Mistakes of the user
derive from `PenstockError`; our own are assertions.
"""

from __future__ import annotations

import functools
import json
import pathlib
import urllib.parse


class PenstockError(Exception):
    """Base of all errors that a user can act on."""


class OptionError(PenstockError, ValueError):
    """An argument does not make sense, alone or beside another."""


class MissingPackageError(PenstockError, ImportError):
    """A feature needs a package of an extra that is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed: "
            f"{install_command(extra)}"
        )
        self._made_of = feature, package, extra

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._made_of


def install_command(extra: str) -> str:
    """Return the command that adds an extra to Penstock as it is installed here.

    An installation from a folder or a repository records where that is (direct_url.json, PEP 610);
    one from a package index records nothing.
    """
    from importlib import metadata  # Takes longer to import than all of this module.

    try:
        text = metadata.distribution("penstock").read_text("direct_url.json")
        origin = json.loads(text) if text else None
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}  # It runs from its sources without being installed.
    if origin is None:
        return f"pip install 'penstock[{extra}]'"
    url = str(origin.get("url", ""))
    folder = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"pip install 'penstock[{extra}] @ {vcs.get('vcs')}+{url}@{vcs.get('commit_id')}'"
    if "archive_info" in origin:
        return f"pip install 'penstock[{extra}] @ {url}'"
    if "dir_info" in origin and (folder / "pyproject.toml").exists():
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of Penstock"


class StoreError(PenstockError):
    """A request to a store failed. `uri` names the object.

    A subclass has no other state: an error that comes from another process is made anew of its
    message and its uri.
    """

    retryable = False
    """Whether asking the same again may succeed: the store is busy or out of reach, and said
    nothing about the object. Remote stores ask again by themselves; the flow asks them for less."""

    def __init__(self, message: str, *, uri: str = "") -> None:
        super().__init__(message)
        self.uri = uri

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments do not survive the default pickling of exceptions.
        return functools.partial(type(self), uri=self.uri), (str(self),)


class NotFoundError(StoreError, FileNotFoundError):
    """No object of that name (404)."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeniedError(StoreError, PermissionError):
    """The store refuses this caller (401, 403)."""

    def __str__(self) -> str:
        return str(self.args[0])


class ExistsError(StoreError):
    """A conditional put found an object already there (409, 412)."""


class RangeError(StoreError):
    """A range lies outside the object (416)."""


class TruncatedError(StoreError):
    """Fewer bytes arrived than were promised."""

    retryable = True


class UnavailableError(StoreError):
    """The store is overloaded or answers with a server error (429, 5xx)."""

    retryable = True


class UnreachableError(StoreError):
    """No connection: name not resolved, connection refused or reset, time-out."""

    retryable = True


class DatasetError(PenstockError):
    """A data set, or one object of it, is not what was expected."""


class FormatError(DatasetError):
    """An object does not follow its format."""


class ChangedError(DatasetError):
    """An object is no longer the one that was indexed."""


class CorruptError(DatasetError):
    """Bytes do not match their checksum."""


class DecodeError(DatasetError):
    """A field of a sample could not be decoded."""


class StateError(PenstockError):
    """A saved state does not fit what it is loaded into."""


class WorkerError(PenstockError):
    """A worker process died without saying why."""


class EngineError(PenstockError):
    """The process that makes the batches died more often than it is restarted."""


class PeerError(PenstockError):
    """Another node did not answer as it should; its bytes are read from the store instead.

    `kind` is "lost" (no connection, or silent for too long), "refused" (it does not know us),
    "stuck" (it answers but makes no progress), "broken" (its bytes or messages make no sense).
    """

    def __init__(self, message: str, *, peer: str = "", kind: str = "lost") -> None:
        super().__init__(message)
        self.peer = peer
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), peer=self.peer, kind=self.kind), (str(self),)


class RendezvousError(PenstockError):
    """The nodes of a job could not find each other."""


class ProgramError(PenstockError, ValueError):
    """A step program, or a change to one, is not valid."""
