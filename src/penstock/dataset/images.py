"""Images as arrays that keep their depth.

Images of up to 8 bits a channel become RGB, as torchvision's loaders have it: uint8 of height ×
width × 3, whether they are grey, have a palette, one bit, CMYK or an alpha channel, which is left
out. Deeper ones are measurements as often as pictures, so nothing is scaled or clipped:

* 16-bit grey is uint16 of height × width, 16-bit RGB uint16 of height × width × 3;
* 32-bit integers are int32 or uint32, floats float32, both of height × width.

What would lose bits on the way is refused.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np

from penstock.errors import MissingPackageError

_JPEG_PIXELS_MAX = 1 << 28
"""Pixels of a JPEG: its header alone may claim 4 billion, which take 12 GB."""
_DEEP_MODES = {"I;16": "u2", "I;16L": "u2", "I;16B": "u2", "I;16N": "u2", "I": "i4", "F": "f4"}
"""Pillow's modes of more than 8 bits, with their NumPy types."""
_OTHER_BYTE = {
    ";16B": ";16L",
    ";16L": ";16B",
    ";16N": ";16B" if sys.byteorder == "little" else ";16L",
}
"""Pillow keeps one byte of a channel of 16 bits. What it takes for the other byte order has the
other one, which is the lower."""

_NATIVE = {"I;16BS": "I;16NS", "I;32BS": "I;32NS", "F;32BF": "F;32NF"}
"""libtiff hands out numbers in the machine's byte order, which Pillow overlooks for these."""


def decode_jpeg(data: memoryview) -> Any:
    """Return a JPEG as an array of height × width × 3."""
    try:
        import simplejpeg
    except ImportError:
        return decode_image(data)
    try:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
    except ValueError:
        return decode_image(data)  # Not a JPEG, whatever its name says.
    if height * width > _JPEG_PIXELS_MAX:
        raise ValueError(
            f"{len(data)} bytes claim to be {height} × {width} pixels, at most {_JPEG_PIXELS_MAX} "
            "are decoded"
        )
    try:
        return simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        # Rare kinds (CMYK, lossless) that libjpeg-turbo does not turn into RGB.
        return decode_image(data)


def decode_image(data: memoryview) -> Any:
    """Return an image of any kind that Pillow knows as an array."""
    with _opened(data) as image:
        raw_mode = _raw_mode(image)
        if ";16" in raw_mode and image.mode not in _DEEP_MODES:
            return _sixteen_bits(data, image, raw_mode)
        _refuse_lossy(image)
        if raw_mode in _NATIVE and image.tile[0].codec_name == "libtiff":
            return pixels_of(_with_raw_mode(image, _NATIVE[raw_mode]))
        if image.mode == "I" and image.format == "TIFF" and raw_mode == "I;32N":
            return np.asarray(image).view(np.uint32)
        if image.mode == "I" and image.format in ("PNG", "PPM"):
            return np.asarray(image).astype(np.uint16)  # Neither has more than 16 bits.
        return pixels_of(image)


def decode_by_content(data: memoryview) -> Any:
    """Return an image whose kind its first bytes say."""
    return decode_jpeg(data) if bytes(data[:2]) == b"\xff\xd8" else decode_image(data)


def pixels_of(image: Any) -> Any:
    """Return the pixels of a Pillow image at their own depth."""
    if image.mode in _DEEP_MODES:
        return np.asarray(image).astype(_DEEP_MODES[image.mode], copy=False)
    # convert() costs as much as decoding, even when there is nothing to do.
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _opened(data: memoryview) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError("decoding images", "pillow", "jpeg") from None
    return Image.open(io.BytesIO(data))


def _raw_mode(image: Any) -> str:
    """Return what the file holds, where Pillow turns it into another mode."""
    found = image.tile[0].args if image.tile else ""
    found = found[0] if isinstance(found, tuple) and found else found
    return found if isinstance(found, str) else ""


def _sixteen_bits(data: memoryview, image: Any, raw_mode: str) -> Any:
    """Return an image of 16 bits a channel from both of its bytes; alpha is left out."""
    if raw_mode == "LA;16B":
        # Grey and alpha are four bytes, as many as 8-bit RGBA has.
        pixels = np.asarray(_with_raw_mode(image, "RGBA")).astype(np.uint16)
        return pixels[..., 0] << 8 | pixels[..., 1]
    channels, suffix = raw_mode[:-4], raw_mode[-4:]
    if channels not in ("RGB", "RGBA") or suffix not in _OTHER_BYTE:
        raise ValueError(
            f"an image of {raw_mode} would be cut to 8 bits a channel; store it as RGB or grey"
        )
    high = np.asarray(image)[..., :3].astype(np.uint16)
    with _opened(data) as again:
        low = np.asarray(_with_raw_mode(again, channels + _OTHER_BYTE[suffix]))[..., :3]
    return high << 8 | low


def _with_raw_mode(image: Any, raw_mode: str) -> Any:
    def changed(args: Any) -> Any:
        return (raw_mode, *args[1:]) if isinstance(args, tuple) else raw_mode

    image.tile = [tile._replace(args=changed(tile.args)) for tile in image.tile]
    return image


def _refuse_lossy(image: Any) -> None:
    """Raise for kinds of which Pillow would keep 8 of more bits."""
    bits = 8
    if image.format == "TIFF":
        bits = max(image.tag_v2.get(258, (8,)))
    elif image.format == "PPM" and image.tile and image.tile[0].codec_name.startswith("ppm"):
        bits = int(image.tile[0].args[-1]).bit_length()
    if bits > 8 and image.mode not in _DEEP_MODES:
        raise ValueError(
            f"a {image.format} of mode {image.mode} with {bits} bits a channel would be cut to 8; "
            "store it as PNG, or as grey"
        )
