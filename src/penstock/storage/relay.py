"""The relay: a new process that uses obstore for a process that cannot (see `clients`, `relayed`).

It is started as `python -m penstock.storage.relay DESCRIPTOR`, where the descriptor is a control
socket. Each thread of the owner sends one end of a socket pair through it, and a thread of the
relay then serves it. The relay listens on no address. It ends when the control socket closes, also
if its owner is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import numpy as np

from penstock import errors
from penstock.storage.direct import DirectObjects
from penstock.storage.frames import (
    PAYLOAD_BYTES_MAX,
    HungUpError,
    RelayAnswer,
    RelayRequest,
    receive_into,
    receive_request,
    send_frame,
)
from penstock.storage.uris import split_uri

_PAGE = 1000
"""Objects of a listing in one frame."""


def serve(connection: socket.socket) -> None:
    """Answer the calls of one thread until it hangs up."""
    with connection:
        try:
            while True:
                request = receive_request(connection)
                body = _payload(connection, request)
                for answer, payload in _answers(request, body):
                    send_frame(connection, answer)
                    if payload is not None:
                        connection.sendall(payload)
        except (HungUpError, ConnectionError):
            return  # the owner's thread has ended, so nobody would read an error


def _payload(connection: socket.socket, request: RelayRequest) -> memoryview:
    assert request.payload_bytes <= PAYLOAD_BYTES_MAX, request.payload_bytes
    body = np.empty(request.payload_bytes, np.uint8).data
    receive_into(connection, body)
    return body


def _answers(
    request: RelayRequest, body: memoryview
) -> Iterator[tuple[RelayAnswer, memoryview | None]]:
    try:
        yield from _results(request, body)
    except Exception as error:
        # Only errors of `penstock.errors` can be sent; any other is a bug, and is sent as text.
        is_ours = type(error).__name__ in vars(errors)
        yield (
            RelayAnswer(
                error_class=type(error).__name__ if is_ours else "StoreError",
                error_message=str(error) if is_ours else f"in the relay: {error!r}",
                error_uri=getattr(error, "uri", ""),
            ),
            None,
        )


def _results(
    request: RelayRequest, body: memoryview
) -> Iterator[tuple[RelayAnswer, memoryview | None]]:
    store = DirectObjects(split_uri(request.uri), request.options)
    match request.operation:
        case "info":
            yield RelayAnswer(objects=[store.info(request.key)]), None
        case "list":
            found = list(store.list(request.key))
            for start in range(0, max(len(found), 1), _PAGE):
                page = found[start : start + _PAGE]
                yield RelayAnswer(objects=page, has_more=start + _PAGE < len(found)), None
        case "peek":
            yield RelayAnswer(objects=list(store.peek(request.key))), None
        case "read":
            data = store.read(request.key)
            yield RelayAnswer(payload_bytes=data.nbytes), data
        case "read_range":
            assert request.wanted is not None
            data = store.read_range(request.wanted, request.offset, request.length)
            yield RelayAnswer(payload_bytes=data.nbytes), data
        case "write":
            info = store.write(request.key, body, only_if_absent=request.only_if_absent)
            yield RelayAnswer(objects=[info]), None
        case "delete":
            store.delete(request.key)
            yield RelayAnswer(), None


def main() -> None:
    """Serve the connections that come through the control socket, until it closes."""
    # Ctrl-C reaches the relay as well, but only its owner decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            # At once, without waiting for requests: nobody is left who waits for their answers.
            os._exit(0)
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
