"""Splits URIs into scheme, container and path, and joins them.

`s3://bucket/a/b` has the container `bucket` and the path `a/b`. For plain http the container is the
host; for folders it is empty, and the path starts with `/`. Percent signs are decoded in http
addresses only: in an object store, `%20` is three ordinary characters of a name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from penstock.errors import OptionError

_ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az", "adl": "az", "abfss": "abfs", "local": "file"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
SCHEMES = ("file", "memory", "s3", "gs", "az", "abfs", "http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedUri:
    """A uri in its parts."""

    scheme: str
    """One of `SCHEMES`."""
    container: str
    """Bucket, host or name of a memory store; empty for folders."""
    path: str
    """The rest, without a leading `/` except for folders; may end with `/`."""

    @property
    def container_uri(self) -> str:
        """The uri of the container itself, ending with `/`."""
        return "/" if self.scheme == "file" else f"{self.scheme}://{self.container}/"

    @property
    def uri(self) -> str:
        """The whole URI, as the user would write it."""
        if self.scheme == "file":
            return self.path
        path = quote(self.path) if self.scheme in ("http", "https") else self.path
        return self.container_uri + path


def split_uri(uri: str) -> ParsedUri:
    """Return the parts of a uri or of a path.

    >>> split_uri("s3://bucket/train/0.tar")
    ParsedUri(scheme='s3', container='bucket', path='train/0.tar')
    """
    found = _SCHEME.match(uri)
    if found is None:
        return _folder_uri(uri)
    scheme = _ALIASES.get(found[1].lower(), found[1].lower())
    rest = uri[found.end() :]
    if scheme not in SCHEMES:
        raise OptionError(
            f"{uri!r}: there is no store for {found[1]}://; there are {', '.join(SCHEMES)}"
        )
    if scheme == "file":
        return _folder_uri("/" + unquote(rest).split("/", 1)[-1] if "/" in rest else rest)
    if scheme in ("http", "https"):
        return _http_place(scheme, uri)
    container, _, path = rest.partition("/")
    if not container:
        raise OptionError(f"{uri!r} names no bucket; write {scheme}://bucket/path")
    return ParsedUri(scheme=scheme, container=container, path=path)


def _http_place(scheme: str, uri: str) -> ParsedUri:
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise OptionError(
            f"{uri!r} has a query or fragment, which a list of objects cannot share; "
            "use the store's own address (s3://, gs://, az://) with credentials instead"
        )
    if not parts.netloc:
        raise OptionError(f"{uri!r} names no host; write {scheme}://host/path")
    return ParsedUri(scheme=scheme, container=parts.netloc, path=unquote(parts.path).lstrip("/"))


def _folder_uri(path: str) -> ParsedUri:
    if not path:
        raise OptionError("an empty name is no place; write '.' for the current folder")
    absolute = os.path.abspath(Path(path).expanduser())  # noqa: PTH100 - also resolves `..`
    is_folder = path.endswith("/") and absolute != "/"
    return ParsedUri(scheme="file", container="", path=absolute + "/" * is_folder)
