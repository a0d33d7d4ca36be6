"""A secret does not get into logs."""

from __future__ import annotations

import pytest

from penstock.engine.peers.base import NoGossip
from penstock.engine.peers.client_link import Identity
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES
from penstock.engine.peers.meeting import Roster
from penstock.engine.peers.node_messages import ListedRun, RegisterRun
from penstock.engine.peers.run_files import RunFile

RUN, SECRET = bytes(RUN_BYTES), b"s3cret! " * (SECRET_BYTES // 8)


@pytest.mark.parametrize(
    "value",
    [
        Identity(name="a", run_id=RUN, secret=SECRET, gossip=NoGossip(), tls=None),
        Roster(run_id=RUN, secret=SECRET, hellos=[]),
        RegisterRun(run_id=RUN, secret=SECRET, shelf=bytes(16), dataset="set"),
        ListedRun(run_id=RUN, secret=SECRET),
        RunFile(run_id=RUN.hex(), secret=SECRET.hex(), members=(), mark="b/1|2/3", host="h"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_carries_a_secret_is_shown_without_it(value: object) -> None:
    for text in (repr(value), str(value), f"{value}", repr([value])):
        assert "run_id=" in text
        assert "s3cret" not in text
        assert SECRET.hex() not in text
