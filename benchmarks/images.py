"""Images: how they are made, and the one way in which everybody decodes them.

Every loader does the same work on a sample, so a difference between two of them is the loader's.
simplejpeg was the fastest decoder found that releases the GIL; linear resizing keeps the decoding
of the JPEG, and not the resizing, the larger part of the work.
"""

import cv2
import numpy as np
import simplejpeg

from benchmarks.works import IMAGE_SIDE, SEED

WIDTH, HEIGHT = 500, 375
QUALITY = 93

# Workers and threads share out the cores already; a second pool inside each would only contend.
cv2.setNumThreads(1)


def make_jpeg(i: int) -> bytes:
    """Return a picture with structure at four scales, as large as a photo of this size (107 KB)."""
    rng = np.random.default_rng([SEED, i])
    picture = np.full((HEIGHT, WIDTH, 3), 128, np.float32)
    for cells, contrast in ((4, 60), (16, 30), (64, 15)):
        coarse = rng.normal(0, contrast, (cells * 3 // 4, cells, 3)).astype(np.float32)
        picture += cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    picture += rng.normal(0, rng.uniform(8, 22), (HEIGHT, WIDTH, 1)).astype(np.float32)
    pixels = np.clip(picture, 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorsubsampling="420")


def decode(data: bytes) -> np.ndarray:
    return resize(simplejpeg.decode_jpeg(data, colorspace="RGB"))


def resize(pixels: np.ndarray) -> np.ndarray:
    return cv2.resize(pixels, (IMAGE_SIDE, IMAGE_SIDE), interpolation=cv2.INTER_LINEAR)
