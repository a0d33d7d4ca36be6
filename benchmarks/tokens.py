"""How fast do rows of tokens reach the training loop, in a global shuffle of local files?

    python -m benchmarks.tokens [--quick] [--rounds 3] [--seconds 2] [--peers ours,torch] [--json F]

Limit: one NumPy gather a batch from the mapped array into a reused buffer, in an order made
beforehand, by one thread or by two, whichever is better.
"""

from benchmarks.compare import compare

if __name__ == "__main__":
    compare("tokens", __doc__.splitlines()[0])
