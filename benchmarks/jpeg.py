"""How fast do JPEG images reach the training loop, decoded to 224 x 224?

    python -m benchmarks.jpeg [--quick] [--rounds 3] [--seconds 2] [--peers ours,torch] [--json F]

Limit: decoding and resizing bytes that are in memory, by one thread or by two. MB are decoded
pixels. Every loader decodes with the same two calls (`benchmarks.images`).
"""

from benchmarks.compare import compare

if __name__ == "__main__":
    compare("jpeg", __doc__.splitlines()[0])
