"""The process of a store on a network: keeps SeaweedFS, makes buckets, ends with its pipe."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from urllib.parse import urlsplit

from penstock.testing import servers


def main(pipe: Pipe) -> None:
    """Run the store; answer its port when first asked, then the uri of a bucket for each name."""
    try:
        pipe.recv()
        _listen_on_all()
        with servers.SeaweedServer() as access:
            pipe.send(urlsplit(access.endpoint).port)
            while True:
                pipe.send(access.create_bucket(pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(error)


def _listen_on_all() -> None:
    """Let the gateway listen for the network; the parts behind it stay on the host's loopback.

    This process is the one in which that is wanted, so it is changed here and for nobody else.
    """
    arguments = servers._weed_arguments

    def open_arguments(folder: Path, ports: list[int]) -> list[str]:
        return [*arguments(folder, ports), "-s3.ip.bind=::"]  # of both families

    servers._weed_arguments = open_arguments
