"""Storage: where bytes live.

A `Store` maps keys to immutable bytes (`base`): memory, a folder, or a remote object store.
`locate` turns a URI or a pattern into objects, `retry` repeats failed calls, `coalesce` merges near
ranges, and `pool` reads many ranges at once. A `Tier` caches units of a data set on this node
(`tier`). What the bytes mean is `dataset`'s business; when they are read is `loader`'s.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.storage.base import Buffer, ObjectInfo, Store
    from penstock.storage.coalesce import Merged, merge_ranges
    from penstock.storage.folder import FolderStore
    from penstock.storage.locate import Located, open_store, resolve
    from penstock.storage.memory import MemoryStore
    from penstock.storage.options import StoreOptions
    from penstock.storage.pool import ReadPool, ReadRequest
    from penstock.storage.remote import RemoteStore
    from penstock.storage.retry import RetryingStore, RetryPolicy
    from penstock.storage.uris import ParsedUri, split_uri

__all__ = [
    "Buffer",
    "FolderStore",
    "Located",
    "MemoryStore",
    "Merged",
    "ObjectInfo",
    "ParsedUri",
    "ReadPool",
    "ReadRequest",
    "RemoteStore",
    "RetryPolicy",
    "RetryingStore",
    "Store",
    "StoreOptions",
    "merge_ranges",
    "open_store",
    "resolve",
    "split_uri",
]

# A local file must not cost the import of remote stores.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Buffer": "base",
        "FolderStore": "folder",
        "Located": "locate",
        "MemoryStore": "memory",
        "Merged": "coalesce",
        "ObjectInfo": "base",
        "ParsedUri": "uris",
        "ReadPool": "pool",
        "ReadRequest": "pool",
        "RemoteStore": "remote",
        "RetryPolicy": "retry",
        "RetryingStore": "retry",
        "Store": "base",
        "StoreOptions": "options",
        "merge_ranges": "coalesce",
        "open_store": "locate",
        "resolve": "locate",
        "split_uri": "uris",
    },
)
