"""What LitData's `index.json` says: the chunks, their packing, and what an item is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.shards import INDEX, parsed, read_index
from penstock.dataset.leaves import NUMPY_TYPES, TORCH_TYPES
from penstock.errors import FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store

_NUMBERS = {"int": "<i8", "float": "<f8", "bool": "|b1"}
_ENCODINGS = {
    "text": "str",
    "json": "litdata_json",
    "numpy": "litdata_numpy",
    "tensor": "litdata_tensor",
    "tiff": "tifffile",
}
_DEPTH_MAX = 64
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class LitDataChunk(msgspec.Struct):
    """One chunk, as the index names it."""

    filename: str
    chunk_size: _Count
    """Number of items."""
    chunk_bytes: _Count
    """Length before compression; older writers leave the table of offsets out of it."""
    dim: _Count | None = None
    """Number of tokens, in token sets."""


class LitDataConfig(msgspec.Struct):
    """How all chunks of a set were written."""

    data_format: list[str]
    """The kind of each leaf."""
    data_spec: str | None = None
    """The tree of an item, as JSON."""
    compression: str | None = None
    compression_level: str | None = None
    encryption: Any = None
    item_loader: str | None = None
    types: Any = None
    """The kinds of all keys, in sets that may be stored as Arrow tables."""


class LitDataTree(msgspec.Struct):
    """A node of the tree that an item is."""

    type: str | None
    """None for a leaf."""
    context: Any = None
    """The keys of a dict, as a list or as JSON of it."""
    children_spec: list[LitDataTree] = []


class LitDataIndex(msgspec.Struct):
    """A parsed `index.json`."""

    chunks: list[LitDataChunk]
    config: LitDataConfig


# The type is prepared here, by one thread: threads that do so at once can end the process.
msgspec.json.Decoder(LitDataIndex)


def indexes_of(objects: Sequence[ObjectInfo], store: Store) -> Iterator[tuple[str, LitDataIndex]]:
    """Yield the folders that have an index, and the index."""
    for info in objects:
        folder, _, name = info.key.rpartition("/")
        if name == INDEX:
            index = read_index(store, info, LitDataIndex, "a LitData")
            _check_names([chunk.filename for chunk in index.chunks], f"{store.uri}{info.key}")
            yield folder + "/" if folder else "", index


def _check_names(names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FormatError(f"{where} is damaged: it names {name!r} twice; copy it anew")
        seen.add(name)


def layout_of(config: LitDataConfig, options: Mapping[str, Any], where: str) -> str:
    """Return how items lie in chunks: `items`, `samples`, `frames`, `chunk` or `tokens`."""
    if config.encryption:
        raise FormatError(
            f"{where} is encrypted, which Penstock does not read; write the set anew without "
            "encryption= and leave that to the store"
        )
    loader = config.item_loader or "PyTreeLoader"
    if loader == "ParquetLoader":
        raise FormatError(f"{where} lists Parquet files; open them with format='parquet'")
    if loader not in ("PyTreeLoader", "TokensLoader"):
        raise FormatError(
            f"{where} was written for the item loader {loader}; PyTreeLoader and TokensLoader "
            "can be read: write it anew with one of them"
        )
    kind = (config.compression or "").split(":")[0]
    if kind not in ("", "zstd"):
        raise FormatError(f"{where}: compression {kind!r}, only zstd can be read; write it anew")
    if loader == "TokensLoader" or "block_size" in options:
        _check_tokens(config, options, where)
        return "tokens"
    levels = {None: "chunk", "": "chunk", "chunk": "chunk", "batch": "frames", "sample": "samples"}
    if kind and config.compression_level not in levels:
        raise FormatError(
            f"{where}: compression_level {config.compression_level!r} is not known; chunk, batch "
            "and sample can be read: write it anew with one of them"
        )
    return levels[config.compression_level] if kind else "items"


def _check_tokens(config: LitDataConfig, options: Mapping[str, Any], where: str) -> None:
    block_size = options.get("block_size")
    if not isinstance(block_size, int) or block_size < 1:
        raise OptionError(
            f"{where} is a set of tokens: pass block_size= with the number of tokens in a sample "
            f"(got {block_size!r})"
        )
    kinds = config.data_format
    if config.compression or len(kinds) != 1 or not kinds[0].startswith("no_header_"):
        raise FormatError(
            f"{where}: block_size= is for sets of one uncompressed array of tokens; this one has "
            f"the leaves {kinds} and compression {config.compression}; leave out block_size="
        )


def fields_of(config: LitDataConfig, where: str) -> list[Field]:
    """Return the fields of an item, a leaf each."""
    otherwise = f"{where} is damaged: its data_spec is not the tree of an item"
    tree = (
        parsed(config.data_spec, tuple[int, LitDataTree], otherwise)[1]
        if config.data_spec
        else _LEAF
    )
    names = [".".join(path) or "data" for path in _paths(tree, (), where)]
    if len(names) != len(config.data_format) or len(set(names)) != len(names) or not names:
        raise FormatError(
            f"{where} is damaged: an item has {len(names)} leaves ({', '.join(names[:8])}) but "
            f"{len(config.data_format)} kinds of them"
        )
    kinds = zip(names, config.data_format, strict=True)
    return [_field(name, kind, where) for name, kind in kinds]


_LEAF = LitDataTree(type=None)


def _paths(tree: LitDataTree, path: tuple[str, ...], where: str) -> Iterator[tuple[str, ...]]:
    """Yield the path to each leaf of a tree."""
    if tree.type is None:
        yield path
        return
    if len(path) > _DEPTH_MAX:
        raise FormatError(f"{where} is damaged: items are nested deeper than {_DEPTH_MAX}")
    keys = _keys(tree.context, len(tree.children_spec))
    for key, child in zip(keys, tree.children_spec, strict=True):
        yield from _paths(child, (*path, key), where)


def _keys(context: Any, number: int) -> list[str]:
    """Return the keys of a dict's children; their positions where it is not a dict."""
    try:
        keys = msgspec.json.decode(context) if isinstance(context, str) else context
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        keys = None
    if isinstance(keys, dict):
        keys = keys.get("dict_context")
    if isinstance(keys, list) and len(keys) == number:
        return [str(key) for key in keys]
    return [str(i) for i in range(number)]


def _field(name: str, kind: str, where: str) -> Field:
    """Return the field of a leaf.

    >>> _field("x", "int", "").dtype, _field("x", "no_header_numpy:5", "").encoding
    ('<i8', 'flat:<u2')
    """
    base = kind.partition(":")[0]
    if base in _NUMBERS:
        return Field(name=name, encoding=VALUE, dtype=_NUMBERS[base], shape=())
    if base in ("no_header_numpy", "no_header_tensor"):
        dtype = token_type(kind, where)
        return Field(name=name, encoding=f"flat:{dtype}" if dtype else kind)
    return Field(name=name, encoding=_ENCODINGS.get(base, base))


def token_type(kind: str, where: str) -> str | None:
    """Return the NumPy type of a flat array's elements, or None where NumPy has none."""
    base, _, number = kind.partition(":")
    if not number.isdecimal() or len(number) > 4:
        raise FormatError(
            f"{where} is damaged: a leaf is {kind!r}, a number of a type is expected after the ':'"
        )
    types = NUMPY_TYPES if base == "no_header_numpy" else TORCH_TYPES
    dtype = types[int(number)] if int(number) < len(types) else "bfloat16"
    return None if dtype == "bfloat16" else dtype


def arrow_fields(config: LitDataConfig, where: str) -> list[Field]:
    """Return the fields of items that are rows of an Arrow table: values, whatever their kind."""
    kinds = config.types if isinstance(config.types, dict) else {}
    names = [f.name for f in fields_of(config, where)]
    names = [n for n in names if n in kinds] + sorted(kinds.keys() - set(names))
    return [
        Field(
            name=name,
            encoding=VALUE,
            dtype=_NUMBERS.get(kinds[name]) if isinstance(kinds[name], str) else None,
            shape=() if isinstance(kinds[name], str) and kinds[name] in _NUMBERS else None,
        )
        for name in names
    ]
