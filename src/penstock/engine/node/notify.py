"""A few words to systemd: ready, stopping, what is going on (`Type=notify`)."""

from __future__ import annotations

import contextlib
import os
import socket


def tell_systemd(**words: object) -> bool:
    """Send words such as READY=1 to whoever started us; False where nobody listens."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    text = "\n".join(f"{name}={value}" for name, value in words.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        # A name that begins with @ is not in the file system.
        sock.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)
        return True
    return False
