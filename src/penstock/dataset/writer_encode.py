"""From values to the bytes of a tar member: by the field's name first, then by the value's type.

Bytes are taken as they are, under any name. A name whose last part is an encoding decides for all
other values: `json` any plain value, `cls` (`cls2`, `id`, `index`, `count`) whole numbers, `txt`
(`text`, `str`) text, `npy` arrays, `jpg` (`jpeg`) and `png` arrays of uint8, which are compressed.

Any other name gets the extension that its value needs to be decoded to the same value again:
`image` with an array becomes `image.npy`, `label` with an int `label.cls`, `caption` with a str
`caption.txt`; lists, dictionaries, floats and all else that is plain become `.json`, in which NaN
and infinities are written as Python's `json` writes them. NumPy's own scalars other than integers
are arrays without axes. None leaves the field out.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.dataset.formats.base import encoding_of
from penstock.dataset.plain_json import encode_json
from penstock.errors import MissingPackageError, OptionError
from penstock.storage.base import Buffer

_JPEG_QUALITY = 95


def check_name(name: str) -> str:
    """Return the name of a field, or raise an error that says why it cannot be one.

    >>> check_name("seg.png")
    'seg.png'
    """
    parts = name.split(".")
    if not all(parts) or "/" in name or "\0" in name or name != name.lower():
        raise OptionError(
            f"{name!r} is not a field's name: it becomes the extension of a file, so write it in "
            f"lower case, without '/' and without a '.' at an end, such as 'jpg' or 'seg.png'"
        )
    return name


def clean_name(name: str) -> str:
    """Return the field's name that comes nearest to a column's.

    >>> clean_name("Image Path"), clean_name(".a/B.png")
    ('image_path', 'a_b.png')
    """
    parts = "_".join(name.lower().replace("/", "_").replace("\0", "_").split()).split(".")
    return ".".join(part for part in parts if part) or "field"


def encode_sample(sample: Mapping[str, Any]) -> dict[str, Buffer]:
    """Return the members of a sample, by field name."""
    out: dict[str, Buffer] = {}
    for given, value in sample.items():
        if value is None:
            continue
        name, data = encode_field(check_name(given), value)
        if name in out:
            raise OptionError(f"two fields of one sample would be {name!r}; rename one of them")
        out[name] = data
    if not out:
        raise OptionError(f"a sample needs at least one field with a value, got {dict(sample)!r}")
    return out


def encode_field(name: str, value: Any) -> tuple[str, Buffer]:
    """Return the name and the bytes of a member that holds a value.

    >>> encode_field("cls", 3), encode_field("caption", "a cat")
    (('cls', b'3'), ('caption.txt', b'a cat'))
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return name, value
    encoder = _BY_NAME.get(encoding_of(name))
    if encoder is None:
        extension = _extension(value)
        name, encoder = f"{name}.{extension}", _BY_NAME[extension]
    try:
        return name, encoder(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"field {name!r} cannot hold a {type(value).__name__}: {error}; give it encoded, as "
            "bytes, or choose a name whose last part says what it is (json, npy, txt, cls)"
        ) from error


def _extension(value: Any) -> str:
    if isinstance(value, str):
        return "txt"
    if isinstance(value, np.integer) or (isinstance(value, int) and not isinstance(value, bool)):
        return "cls"
    return "npy" if isinstance(value, np.ndarray | np.generic) else "json"


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError("text is expected")
    return value.encode()


def _int(value: Any) -> bytes:
    if not isinstance(value, int | np.integer):
        raise TypeError("a whole number is expected")
    return str(int(value)).encode()


def _json(value: Any) -> bytes:
    return encode_json(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"JSON has nothing for a {type(value).__name__}")


def npy_bytes(value: Any) -> bytes:
    """Return an array as a `.npy` file holds it."""
    out = io.BytesIO()
    np.save(out, np.asarray(value), allow_pickle=False)
    return out.getvalue()


def _pixels(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        raise TypeError("an array of uint8 is expected")
    axes = value.shape[:2] if value.ndim == 3 and value.shape[2] == 1 else value.shape
    if len(axes) != 2 and not (len(axes) == 3 and axes[2] == 3):
        raise ValueError(f"shape (height, width) or (height, width, 3) is expected, not {axes}")
    return np.ascontiguousarray(value.reshape(axes))


def _jpeg(value: Any) -> bytes:
    pixels = _pixels(value)
    try:
        import simplejpeg
    except ImportError:
        raise MissingPackageError("encoding JPEG", "simplejpeg", "jpeg") from None
    grey = pixels.ndim == 2
    return bytes(
        simplejpeg.encode_jpeg(
            pixels[..., None] if grey else pixels,
            quality=_JPEG_QUALITY,
            colorspace="GRAY" if grey else "RGB",
            colorsubsampling="Gray" if grey else "444",
        )
    )


def _png(value: Any) -> bytes:
    pixels = _pixels(value)
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError("encoding PNG", "pillow", "jpeg") from None
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


_BY_NAME: dict[str, Callable[[Any], bytes]] = {
    "json": _json,
    **dict.fromkeys(("cls", "cls2", "id", "index", "count"), _int),
    **dict.fromkeys(("txt", "text", "str"), _text),
    "npy": npy_bytes,
    **dict.fromkeys(("jpg", "jpeg"), _jpeg),
    "png": _png,
}
