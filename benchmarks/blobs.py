"""How fast do blobs of about 110 KB reach the training loop from local files?

    python -m benchmarks.blobs [--quick] [--rounds 3] [--seconds 2] [--peers ours,torch] [--json F]

Limit: copying the mapped bytes of a batch into a reused buffer, in the same kind of order, by one
thread or by two, whichever is better.
"""

from benchmarks.compare import compare

if __name__ == "__main__":
    compare("blobs", __doc__.splitlines()[0])
