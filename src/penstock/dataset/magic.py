"""What a file really is if its name promises something else, judged by its first bytes."""

from __future__ import annotations

from penstock.errors import StoreError
from penstock.storage.base import ObjectInfo, Store

_HEAD_BYTES = 64
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", ".gz", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst", "unzstd"),
    b"BZh": ("bzip2", ".bz2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", ".xz", "unxz"),
}
_OTHERS = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file: name it .parquet, or pass format='parquet'",
    b"ARROW1": "an Arrow file: name it .arrow, or pass format='arrow'",
    b"\x93NUMPY": "a NumPy array: name it .npy, or pass format='npy'",
    b"version https://git-lfs": "a Git LFS pointer, not the data: run `git lfs pull`",
    b"<": "HTML or XML, such as a server sends for an error or a login: download it again",
}
_NAMED_SO = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow", ".npy", ".html")


def what_else(store: Store, info: ObjectInfo, format: str) -> str:
    """Return a sentence that says what an object is instead of what its name says, or nothing."""
    name = info.key.lower()
    if any(extension in name for extension in _NAMED_SO):
        return ""
    try:
        head = bytes(store.read_range(info, 0, min(_HEAD_BYTES, info.size_bytes)))
    except StoreError:
        return ""
    where = f"{store.uri}{info.key} is named like {format} but is"
    if not head:
        return f"{where} an empty file: copy it again, or delete it"
    for magic, (kind, ending, command) in _COMPRESSED.items():
        if head.startswith(magic):
            return (
                f"{where} compressed with {kind}, so its samples cannot be addressed: decompress "
                f"it (add {ending} to its name and run `{command}`)"
            )
    for magic, words in _OTHERS.items():
        if head.lstrip().startswith(magic):
            return f"{where} {words}"
    return ""
