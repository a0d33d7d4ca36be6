"""Node services and jobs beside them: what a rank does, without a loader."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import traceback
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.engine.node.options import options_of
from penstock.engine.node.service import NodeService
from penstock.engine.node.signals import Signals
from penstock.engine.peers.local import LocalNode
from penstock.engine.peers.node_messages import TiersOpened
from penstock.storage.tier import Tiers
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape

UNIT_BYTES = 10_000


@dataclass
class Folders:
    """Where a service may keep data."""

    memory: Path
    disk: Path

    @property
    def socket(self) -> str:
        return str(self.disk / "node.sock")


@dataclass
class StartedNode:
    """A service that runs in a forked child."""

    pid: int
    socket: str
    port: int
    http: int
    log: Path
    code: int | None = None

    def connect(self) -> LocalNode:
        node = LocalNode.connect(self.socket)
        assert node is not None
        return node

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Return the exit code, once there is one."""
        if self.code is None:
            watched = os.pidfd_open(self.pid)
            try:
                assert select.select([watched], [], [], timeout_s)[0], self.log.read_text()
            finally:
                os.close(watched)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def start_node(given: Mapping[str, object], log: Path, user: int | None = None) -> StartedNode:
    """Start a service and wait until it is ready; a port of 0: it refused, see the log."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve(given, log, user, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        words = pipe.readline().split()
    port, http = map(int, words or ("0", "0"))
    return StartedNode(pid, str(given["socket"]), port, http, log)


def _serve(given: Mapping[str, object], log: Path, user: int | None, writing: int) -> None:
    code = 1
    try:
        with log.open("w") as out:
            os.dup2(out.fileno(), 2)
        with contextlib.suppress(OSError):
            os.close(0)
        logger = logging.getLogger("penstock")
        logger.handlers = [logging.StreamHandler(os.fdopen(2, "w", closefd=False))]
        logger.setLevel(logging.INFO)
        if user is not None:
            become(user, user)
        with Signals() as signals, NodeService(options_of(given, {})) as service:
            assert service.web is not None
            os.write(
                writing, f"{service.server.address.port} {service.web.address.port}\n".encode()
            )
            os.close(writing)
            code = service.wait(signals)
    except BaseException:
        log.open("a").write(traceback.format_exc())
    finally:
        os._exit(code)


def get(node: StartedNode, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.http}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def become(user: int, group: int) -> None:
    """Go on as another user; all is imported by now, wherever the interpreter lies."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def shape(name: str = "data", num_units: int = 50) -> TierShape:
    lengths = np.full(num_units, UNIT_BYTES, np.int64)
    offsets = np.cumsum(lengths) - lengths
    return TierShape(
        name=name, offsets=offsets, lengths=lengths, about={"uri": f"s3://bucket/{name}/"}
    )


def unit_bytes(unit: int) -> bytes:
    return bytes([unit % 251]) * UNIT_BYTES


@dataclass
class Job:
    """A process's view: its connection, what it was granted, its tiers."""

    node: LocalNode
    opened: TiersOpened
    tiers: Tiers
    shape: TierShape

    def fill(self, units: range) -> None:
        for unit in units:
            tier = self.tiers.tiers[int(self.tiers.tier_of(np.array([unit]))[0])]
            if tier.claim(unit):
                assert tier.write(unit, unit_bytes(unit))
                tier.release(unit)

    def held(self) -> int:
        units = np.arange(self.shape.num_units)
        return int(self.tiers.settle(units).sum())

    def end(self) -> None:
        self.tiers.close()
        self.node.close()


def begin_job(node: StartedNode, job_shape: TierShape | None = None) -> Job:
    """Do what a rank does: ask, open, let it be kept."""
    job_shape = job_shape or shape()
    local = node.connect()
    opened = local.open(
        dataset=job_shape.name,
        num_units=job_shape.num_units,
        size_bytes=job_shape.size_bytes,
        about=job_shape.about,
    )
    tiers = open_tiers(opened.wishes, job_shape)
    local.keep(job_shape.name)
    return Job(local, opened, tiers, job_shape)
