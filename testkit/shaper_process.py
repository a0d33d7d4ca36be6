"""The process of a shaper, and the pipe to its owner.

The first message is `Orders`, answered by a port or an error; all others are shapes or None,
answered by counts. The process ends with the pipe, and with its owner, however the owner ends.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection as Pipe

from testkit.shaper_server import Server
from testkit.shaper_shape import Shape

_OWNER_POLL_S = 0.5
"""A forked child of the owner may keep the pipe open, so the parent is checked as well."""


def serve(pipe: Pipe, owner: int) -> None:
    """Run until the owner hangs up or is gone."""
    orders = pipe.recv()
    try:
        server = Server(orders)
    except OSError as error:
        pipe.send(error)
        return
    pipe.send(server.port)
    loop = server.loop

    def on_pipe(_: int) -> None:
        try:
            asked = pipe.recv()
        except (EOFError, OSError):
            loop.stop()
            return
        if isinstance(asked, Shape):
            server.reshape(asked)
        pipe.send(server.counts())

    def look() -> None:
        if os.getppid() != owner:
            loop.stop()
        loop.at(loop.now_s() + _OWNER_POLL_S, look)

    loop.watch_level(pipe.fileno(), on_pipe)
    look()
    loop.run()


def main(descriptor: int, owner: int) -> None:
    """Take orders from a pipe, by its descriptor, as long as a process is our parent."""
    # Ctrl-C is for the owner; this process ends with its pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()  # a collection that looks through all modules would hold up answers for 10 ms
    serve(Pipe(descriptor), owner)
    os._exit(0)  # at once: answers under way have nobody left who waits for them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
