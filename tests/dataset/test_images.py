"""Images keep their depth: nothing is clipped, scaled or cut without a word."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.dataset.fields import DECODERS
from penstock.dataset.leaves import decode_pil
from penstock.errors import DecodeError

RNG = np.random.default_rng(11)
DEEP = RNG.integers(0, 65536, (5, 7), dtype=np.uint16)
DEEP[0, 0] = 40_000


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(extension: str, data: bytes) -> Any:
    return DECODERS[extension](memoryview(data))


def same(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def png16(values: np.ndarray[Any, Any], colour_type: int) -> bytes:
    """Return a PNG of 16 bits a channel, each row filtered in another way."""
    rows, width = values.astype(">u2").reshape(len(values), -1).view(np.uint8), values.shape[1]
    step = rows.shape[1] // width
    lines = []
    for number, row in enumerate(rows.astype(np.int64)):
        left = np.concatenate([np.zeros(step, np.int64), row[:-step]])
        above = rows[number - 1].astype(np.int64) if number else np.zeros_like(row)
        kind = number % 4
        guess = [np.zeros_like(row), left, above, (left + above) // 2][kind]
        lines.append(bytes([kind]) + ((row - guess) % 256).astype(np.uint8).tobytes())
    head = struct.pack(">IIBBBBB", width, len(values), 16, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b"")]
    out = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        out += struct.pack(">I", len(body)) + name + body
        out += struct.pack(">I", zlib.crc32(name + body))
    return out


def tiff(values: np.ndarray[Any, Any], *, order: str = "<", packed: bool = False) -> bytes:
    """Return a TIFF of one strip with the type of an array."""
    channels = values.shape[2] if values.ndim == 3 else 1
    bits = values.dtype.itemsize * 8
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    body = values.astype(values.dtype.newbyteorder(order)).tobytes()
    body = zlib.compress(body) if packed else body
    extra = struct.pack(f"{order}{channels}H", *[bits] * channels)
    start = 8 + 2 + 10 * 12 + 4
    many = channels > 2
    tags = [
        (256, 4, 1, values.shape[1]),
        (257, 4, 1, values.shape[0]),
        (258, 3, channels, start if many else bits),
        (259, 3, 1, 8 if packed else 1),
        (262, 3, 1, 2 if channels > 2 else 1),
        (273, 4, 1, start + len(extra)),
        (277, 3, 1, channels),
        (278, 4, 1, values.shape[0]),
        (279, 4, 1, len(body)),
        (339, 3, 1, kind),
    ]
    out = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, len(tags))
    for tag, width, count, value in tags:
        small = width == 3 and count == 1
        out += struct.pack(f"{order}HHI", tag, width, count)
        out += struct.pack(f"{order}HH", value, 0) if small else struct.pack(f"{order}I", value)
    return out + bytes(4) + extra + body


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_depth(kind: str) -> None:
    extension = {"PNG": "png", "TIFF": "tif", "PPM": "pgm"}[kind]
    same(decoded(extension, saved(Image.fromarray(DEEP), kind)), DEEP)


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_every_kind_of_16_bit_png_keeps_its_depth(colour_type: int, channels: int) -> None:
    values = RNG.integers(0, 65536, (9, 6, channels), dtype=np.uint16)
    expected = values[..., :3] if channels > 2 else values[..., 0]
    same(decoded("png", png16(values, colour_type)), expected)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["u2", "i2", "f4"])
def test_deep_grey_tiff_keeps_its_values(order: str, packed: bool, dtype: str) -> None:
    values = (DEEP.astype(np.float64) - 20_000.5).astype(dtype)
    found = decoded("tif", tiff(values, order=order, packed=packed))
    same(found, values.astype("i4") if dtype == "i2" else values)


@pytest.mark.parametrize("dtype", ["u4", "i4"])
def test_32_bit_tiff_keeps_its_values(dtype: str) -> None:
    values = (DEEP.astype(np.int64) * 65_536 - (1 << 31 if dtype == "i4" else 0)).astype(dtype)
    same(decoded("tiff", tiff(values)), values)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("packed", [False, True])
def test_16_bit_rgb_tiff_keeps_its_depth(order: str, packed: bool) -> None:
    values = RNG.integers(0, 65536, (4, 6, 3), dtype=np.uint16)
    same(decoded("tif", tiff(values, order=order, packed=packed)), values)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_8_bits_and_fewer_are_rgb(mode: str) -> None:
    image = Image.fromarray(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)).convert(mode)
    same(decoded("png", saved(image, "PNG")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "image"])
def test_cmyk_is_rgb(extension: str) -> None:
    data = saved(Image.new("CMYK", (7, 5), (10, 20, 30, 40)), "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_allclose(decoded(extension, data).astype(int), expected, atol=1)


@pytest.mark.parametrize(("mode", "dtype"), [("I;16", "u2"), ("I", "i4"), ("F", "f4")])
def test_unpacked_images_of_mds_and_litdata_keep_their_depth(mode: str, dtype: str) -> None:
    values = DEEP.astype(dtype)
    head = struct.pack("<3I", 7, 5, len(mode)) + mode.encode()
    same(decode_pil(memoryview(head + values.tobytes())), values)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.ppm", b"P6 2 1 65535 " + bytes(12), "16 bits a channel would be cut to 8"),
        ("a.jpg", b"", "65500 × 65500 pixels"),
    ],
)
def test_what_would_lose_bits_or_fill_memory_is_refused(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    if name.endswith("jpg"):
        whole = saved(Image.new("RGB", (16, 16)), "JPEG")
        at = whole.index(b"\xff\xc0") + 5
        data = whole[:at] + struct.pack(">HH", 65_500, 65_500) + whole[at + 4 :]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DecodeError, match=words):
        penstock.open(tmp_path)[0]


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_fields_are_read_as_numpy_reads_them(order: Any) -> None:
    for values in (np.asarray(DEEP, order=order), np.float32(3), np.zeros((0, 3)), np.array("ä")):
        out = io.BytesIO()
        np.save(out, values)
        same(decoded("npy", out.getvalue()), np.asarray(values))
    out = io.BytesIO()
    np.savez_compressed(out, a=DEEP, b=np.arange(3))
    found = decoded("npz", out.getvalue())
    assert list(found) == ["a", "b"]
    same(found["a"], DEEP)
