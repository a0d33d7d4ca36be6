"""How the columns of an Arrow schema become fields; Parquet and Arrow IPC share it.

Numbers and lists of one size have a type and a shape; bytes stay encoded. Features that Hugging
Face keeps in the schema are followed: images, audio and video are their encoded bytes, `Array2D`
and its like are arrays, names of class labels go into the part's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Options
from penstock.errors import FormatError, MissingPackageError, OptionError


def import_pyarrow(feature: str) -> Any:
    """Return pyarrow with its parts for Parquet and IPC, imported on first use."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError(feature, "pyarrow", "parquet") from None
    return pyarrow


_MEDIA = {"Image": "image", "Audio": "audio", "Video": "video"}


def fields_of(
    schema: Any, null_paths: set[str], options: Options, where: str
) -> tuple[list[Field], dict[str, Any]]:
    """Return the fields of a schema, and what else a part should keep: names of classes.

    `null_paths` are the nodes of the schema's tree that may hold nulls.
    """
    names = list(options.get("columns") or schema.names)
    unknown = [n for n in names if n not in schema.names]
    if unknown:
        raise OptionError(f"{where} has no column {unknown[0]!r}; it has: {schema.names}")
    if not names or len(set(names)) < len(names):
        raise FormatError(f"{where} has columns without a name of their own: {names}; rename them")
    features = features_of(schema)
    fields = [_field(schema.field(n), features.get(n, {}), null_paths) for n in names]
    classes = {n: features[n]["names"] for n in names if "names" in features.get(n, {})}
    return fields, {"classes": classes} if classes else {}


def features_of(schema: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the features that Hugging Face describes in a schema, by column; there may be none."""
    try:
        known = msgspec.json.decode((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in known.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, AttributeError, ValueError):  # Not JSON, or not UTF-8.
        return {}


def _field(column: Any, feature: Mapping[str, Any], null_paths: set[str]) -> Field:
    import pyarrow as pa

    name, kind = column.name, _plain(column.type)
    holding = {p for p in null_paths if p == name or p.startswith(f"{name}.")}
    media = media_of(kind, feature)
    if media:
        return Field(name=name, encoding=media, optional=bool(holding & {name, f"{name}.bytes"}))
    optional = column.nullable and bool(holding)
    if is_bytes(kind):
        return Field(name=name, encoding="bytes", optional=optional)
    shape: tuple[int, ...] | None = ()
    if "shape" in feature and is_list(kind):
        shape = tuple(feature["shape"]) if None not in feature["shape"] else None
        while is_list(kind):
            kind = _plain(kind.value_type)
    while pa.types.is_fixed_size_list(kind) and shape is not None:
        shape = (*shape, kind.list_size)
        kind = _plain(kind.value_type)
    dtype = np.dtype(kind.to_pandas_dtype()).str if is_number(kind) else None
    return Field(
        name=name, encoding=VALUE, dtype=dtype, shape=shape if dtype else None, optional=optional
    )


def _plain(kind: Any) -> Any:
    """Return the type that an extension or a dictionary stores its values in."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    return _plain(kind.value_type) if pa.types.is_dictionary(kind) else kind


def media_of(kind: Any, feature: Mapping[str, Any]) -> str:
    """Return the encoding of a Hugging Face image, audio or video; nothing for other features."""
    import pyarrow as pa

    is_pair = pa.types.is_struct(kind) and {f.name for f in kind} == {"bytes", "path"}
    return _MEDIA.get(feature.get("_type", ""), "") if is_pair else ""


def is_number(kind: Any) -> bool:
    """Return whether values are numbers that NumPy has."""
    import pyarrow as pa

    return any(f(kind) for f in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def is_list(kind: Any) -> bool:
    """Return whether values are lists of any length."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_bytes(kind: Any) -> bool:
    """Return whether values are bytes."""
    import pyarrow as pa

    of = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(f(kind) for f in of)
