"""The process of a front: a shaper that listens on the address of its host, not on loopback."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection as Pipe

from penstock.testing import ports


def main(pipe: Pipe) -> None:
    """Take the address first, then what a shaper takes."""
    try:
        ports.HOST = pipe.recv()
        from testkit.shaper_process import serve  # listens on what HOST is by now

        pipe.send(None)
        serve(pipe, os.getppid())
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
