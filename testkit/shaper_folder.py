"""A folder as a store that can be read: ranged GET, HEAD and listings, by http and as an S3 bucket.

Anybody may read, with or without a signature; it is one bucket, and listens on loopback only.
"""

from __future__ import annotations

import os
import posixpath
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import formatdate
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote_to_bytes

from testkit.shaper_http import Request, error_of, head_of
from testkit.shaper_transfer import Body, FileBody, MemoryBody, OpenFile

OPEN_FILES_MAX = 512
"""Files kept open between requests."""
_PAGE_KEYS_MAX = 1000


class _Known(NamedTuple):
    """An open file, and by what it is recognised as the same."""

    mark: tuple[int, int, int]
    file: OpenFile
    headers: str


class _Listed(NamedTuple):
    """An object of a listing."""

    key: str
    size_bytes: int
    mtime_ns: int


class Folder:
    """Answers requests from the files below a folder."""

    def __init__(self, root: str | Path, bucket: str) -> None:
        self._root = os.fspath(root)
        self._bucket = bucket
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._listing: tuple[str, list[_Listed]] = ("", [])

    def answer(self, request: Request) -> tuple[bytes, Body]:
        """Return head and body of the answer to a request."""
        if request.method not in (b"GET", b"HEAD"):
            return _error(405, "MethodNotAllowed", "a shaped folder can only be read")
        path = os.fsdecode(unquote_to_bytes(request.path)).removeprefix("/")
        bucket, _, key = path.partition("/")
        if bucket != self._bucket:
            return _error(404, "NoSuchBucket", f"the bucket of this folder is {self._bucket!r}")
        if not key:
            return self._list(request)
        return self._object(request, key)

    def _object(self, request: Request, key: str) -> tuple[bytes, Body]:
        try:
            found = self._open(key)
        except (OSError, ValueError) as error:
            return _error(404, "NoSuchKey", f"{key}: {error}")
        size_bytes = found.mark[2]
        span = request.span(size_bytes)
        headers = found.headers
        if span is None:
            return _error(416, "InvalidRange", f"{key} has {size_bytes} bytes")
        start, stop = span
        is_part = b"range" in request.headers
        if is_part:
            headers += f"Content-Range: bytes {start}-{stop - 1}/{size_bytes}\r\n"
        head = head_of(206 if is_part else 200, stop - start, headers)
        if request.method == b"HEAD":
            return head, MemoryBody(b"")
        return head, FileBody(found.file, start, stop)

    def _open(self, key: str) -> _Known:
        if posixpath.normpath(key) != key or key.startswith(("../", "/")) or key == "..":
            raise ValueError("not a plain path")
        path = f"{self._root}/{key}"
        status = os.stat(path)  # noqa: PTH116 (called for every request)
        mark = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(key)
        if known is None or known.mark != mark:
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a file")
            known = self._known[key] = _Known(mark, OpenFile(path), _headers(mark))
        self._known.move_to_end(key)
        if len(self._known) > OPEN_FILES_MAX:
            self._known.popitem(last=False)
        return known

    # -- listings ----------------------------------------------------------------------------

    def _list(self, request: Request) -> tuple[bytes, Body]:
        """Answer ListObjectsV2; anything else that is asked of the bucket gets an empty 200."""
        asked = {name: values[0] for name, values in parse_qs(os.fsdecode(request.query)).items()}
        if request.method == b"HEAD" or asked.get("list-type") != "2":
            return head_of(200, 0), MemoryBody(b"")
        body = self._page(asked)
        return head_of(200, len(body), "Content-Type: application/xml\r\n"), MemoryBody(body)

    def _page(self, asked: dict[str, str]) -> bytes:
        prefix, token = asked.get("prefix", ""), asked.get("continuation-token", "")
        if not token or self._listing[0] != prefix:  # later pages are of the first one's moment
            self._listing = prefix, sorted(_below(self._root, prefix))
        entries = self._listing[1]
        start = bisect_right(entries, max(token, asked.get("start-after", "")), key=_key)
        keys_max = min(int(asked.get("max-keys", _PAGE_KEYS_MAX)), _PAGE_KEYS_MAX)
        shown, stop = _grouped(entries, start, prefix, asked.get("delimiter", ""), keys_max)
        show = quote if asked.get("encoding-type") == "url" else escape
        next_token = ""
        if stop < len(entries):
            next_key = escape(entries[stop - 1].key)
            next_token = f"<NextContinuationToken>{next_key}</NextContinuationToken>"
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self._bucket}</Name><Prefix>{show(prefix)}</Prefix>"
            f"<KeyCount>{len(shown)}</KeyCount><MaxKeys>{keys_max}</MaxKeys>"
            f"<IsTruncated>{str(bool(next_token)).lower()}</IsTruncated>{next_token}"
            + "".join(_entry_xml(entry, show(_key(entry))) for entry in shown)
            + "</ListBucketResult>"
        )
        return text.encode(errors="surrogateescape")


def _grouped(
    entries: list[_Listed], start: int, prefix: str, delimiter: str, count_max: int
) -> tuple[list[_Listed | str], int]:
    """Return what a page shows, objects and common prefixes, and where the next one begins."""
    shown: list[_Listed | str] = []
    at = start
    while at < len(entries):
        entry = entries[at]
        rest = entry.key[len(prefix) :]
        item: _Listed | str = entry
        if delimiter and delimiter in rest:
            item = prefix + rest.partition(delimiter)[0] + delimiter
        if not shown or item != shown[-1]:
            if len(shown) == count_max:
                break
            shown.append(item)
        at += 1
    return shown, at


def _key(entry: _Listed | str) -> str:
    return entry if isinstance(entry, str) else entry.key


def _entry_xml(entry: _Listed | str, shown_key: str) -> str:
    if isinstance(entry, str):
        return f"<CommonPrefixes><Prefix>{shown_key}</Prefix></CommonPrefixes>"
    moment = datetime.fromtimestamp(entry.mtime_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return (
        f"<Contents><Key>{shown_key}</Key><LastModified>{moment}</LastModified>"
        f"<ETag>{escape(_etag(entry.mtime_ns, entry.size_bytes))}</ETag>"
        f"<Size>{entry.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _below(root: str, prefix: str) -> Iterator[_Listed]:
    """Yield all files whose key begins with a prefix; other folders are not opened."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{root}/{folder}") as found:
            for each in found:
                key = folder + each.name
                if each.is_dir():
                    if (key + "/").startswith(prefix) or prefix.startswith(key + "/"):
                        folders.append(key + "/")
                elif key.startswith(prefix) and each.is_file():
                    status = each.stat()
                    yield _Listed(key, status.st_size, status.st_mtime_ns)


def _headers(mark: tuple[int, int, int]) -> str:
    _, mtime_ns, size_bytes = mark
    return (
        f"ETag: {_etag(mtime_ns, size_bytes)}\r\nAccept-Ranges: bytes\r\n"
        f"Last-Modified: {formatdate(mtime_ns // 10**9, usegmt=True)}\r\n"
        "Content-Type: application/octet-stream\r\n"
    )


def _etag(mtime_ns: int, size_bytes: int) -> str:
    return f'"{mtime_ns:x}-{size_bytes:x}"'


def _error(status: int, code: str, message: str) -> tuple[bytes, Body]:
    head, body = error_of(status, code, message)
    return head, MemoryBody(body)
