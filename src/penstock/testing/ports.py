"""Free ports of the loopback interface."""

from __future__ import annotations

import contextlib
import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on now.

    All are held open together while they are picked, so none is given out twice. Another process
    may still take one before it is used; whoever starts a server must notice that it did not come
    up.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
