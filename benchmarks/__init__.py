"""Benchmarks: one question a file, each answered beside its limit and beside the peers.

    python -m benchmarks.peers.setup          # once: an environment for each peer
    python -m benchmarks.tokens --quick       # or blobs, jpeg, open, resume

`works` says what is loaded, `loops` what is done with it, `window` how a loader is timed from
inside its process. `process` runs that in the environment of one peer, `compare` takes turns among
all of them and prints the table. `under_test` knows the options of the loader of this checkout.
A peer is one file of `peers/`; nothing else knows its name.
"""
