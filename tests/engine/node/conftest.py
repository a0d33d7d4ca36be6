"""A node service in a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engine.node.jobs import Folders, StartedNode, start_node


@pytest.fixture
def folders() -> Iterator[Folders]:
    """Give room for a service on a real tmpfs and on a disk, and nobody else's."""
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="node"))
        for folder in (memory, disk):
            os.chmod(folder, 0o755)  # noqa: PTH101 - jobs of other users pass through
        yield Folders(memory=Path(memory), disk=Path(disk))


@pytest.fixture
def start(folders: Folders, tmp_path: Path) -> Iterator[Callable[..., StartedNode]]:
    """Give a function that starts a service in `folders`; None takes an option away."""
    nodes: list[StartedNode] = []

    def begin(user: int | None = None, **options: object) -> StartedNode:
        given = {
            "memory": f"{folders.memory}:1MB",
            "disk": [f"{folders.disk}:10MB"],
            "listen": "127.0.0.1:0",
            "http": "127.0.0.1:0",
            "socket": folders.socket,
            **options,
        }
        node = start_node(given, tmp_path / f"log{len(nodes)}", user)
        nodes.append(node)
        assert node.port, node.log.read_text()
        return node

    yield begin
    for node in nodes:
        node.kill()
