"""What becomes of a file that DLIO has generated, and what is refused."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from penstock.errors import OptionError, PenstockError
from penstock.loader.dlio.classes import refuse_missing_class
from penstock.loader.dlio.parse import array_of, parsed_sample, refuse_format

PIXELS = np.random.default_rng(7).integers(255, size=(20, 30), dtype=np.uint8)


def stored(format: str) -> bytes:
    out = io.BytesIO()
    if format == "npz":
        np.savez(out, x=PIXELS, y=[0])
    elif format == "npy":
        np.save(out, PIXELS)
    else:
        Image.fromarray(PIXELS).save(out, format=format.upper())
    return out.getvalue()


@pytest.mark.parametrize("format", ["npz", "npy", "png"])
def test_a_file_is_parsed_to_the_array_that_was_stored(format: str) -> None:
    assert np.array_equal(array_of(stored(format), format), PIXELS)


def test_a_jpeg_is_decoded() -> None:
    assert array_of(stored("jpeg"), "jpeg").shape == PIXELS.shape


def test_every_byte_of_an_npz_file_is_looked_at() -> None:
    damaged = bytearray(stored("npz"))
    damaged[len(damaged) // 3] ^= 1  # inside the array
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        array_of(bytes(damaged), "npz")


def test_a_sample_in_a_batch_is_bytes_of_the_file_and_tells_its_size() -> None:
    raw = stored("npz")
    sample = parsed_sample({"npz": raw}, format="npz", side=15)
    assert sample["size_bytes"] == len(raw)
    assert np.array_equal(sample["image"].ravel(), PIXELS.ravel()[:225])


def test_formats_that_are_not_one_sample_a_file_are_refused() -> None:
    with pytest.raises(OptionError, match="tfrecord"):
        refuse_format("tfrecord", 1)
    with pytest.raises(OptionError, match="num_samples_per_file is 4"):
        refuse_format("npz", 4)


def test_a_class_that_dlio_would_ignore_is_refused() -> None:
    refuse_missing_class("penstock.errors.OptionError", PenstockError)
    for path in ("penstock.errors.OptionEror", "penstock.loader.dlio.ledger.Ledger", "Loader"):
        with pytest.raises(OptionError, match="run its own"):
            refuse_missing_class(path, PenstockError)
