"""Torch's own stores as places to meet, and real agents of torchrun that restart their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from penstock.errors import RendezvousError
from penstock.loader.torch.rendezvous import TorchRendezvous, rendezvous_here
from penstock.testing.ports import HOST, free_ports

Make = Callable[[], TorchRendezvous]


@pytest.fixture(params=["tcp", "file", "hash"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return what each process would do to get to one and the same store."""
    if request.param == "tcp":
        server = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        yield lambda: TorchRendezvous(distributed.TCPStore(HOST, server.port))
    elif request.param == "file":
        kept = distributed.FileStore(str(tmp_path / "store"), 100)
        yield lambda: TorchRendezvous(distributed.FileStore(str(tmp_path / "store"), 100))
        del kept
    else:
        store = distributed.HashStore()
        yield lambda: TorchRendezvous(store)


def test_a_store_of_torch_is_a_place_to_meet(make: Make) -> None:
    mine, other = make(), make()
    assert other.try_get("run/a") is None
    mine.put("run/a", b"\x00\xffone")
    assert other.get("run/a", timeout_s=10) == b"\x00\xffone"
    other.put("run/a", b"")
    assert mine.try_get("run/a") == b""
    with pytest.raises(RendezvousError, match="nobody set run/never in torch's store within 20 ms"):
        mine.get("run/never", timeout_s=0.02)


def test_of_many_that_put_once_all_get_the_value_of_one(make: Make) -> None:
    values = [f"value {number}".encode() for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        seen = set(pool.map(lambda value: make().put_once("run/secret", value), values))
    assert len(seen) == 1
    assert seen <= set(values)


def test_a_store_whose_host_went_away_is_an_error_with_a_way_out() -> None:
    server = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    place = TorchRendezvous(distributed.TCPStore(HOST, server.port, timeout=timedelta(seconds=2)))
    place.put("run/a", b"1")
    del server
    with pytest.raises(RendezvousError, match="see whether that host is up"):
        place.try_get("run/a")


def test_without_a_group_or_an_agent_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", "1")  # Somebody may listen there once a group is made.
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous_here() is None


_RANK = """
import json, os, sys, time, uuid
from pathlib import Path
from torch import distributed
from penstock.engine.peers.base import Address
from penstock.engine.peers.join import join
from penstock.engine.peers.members import Member
from penstock.loader.torch.rendezvous import rendezvous_here
from penstock.world import World

world = World.from_env()
folder = Path(sys.argv[1])

def meet(key):
    mine = Member(
        name=uuid.uuid4().hex, node=world.node, addresses=(Address(host="127.0.0.1", port=1),),
        capacity_bytes=1, incarnation=1, host=f"host-{world.node}",
    ) if world.is_first_of_node else None
    place = rendezvous_here()
    found = join(place, world, key=key, mine=mine, digest=b"same", timeout_s=100)
    return [found.secret.hex(), [member.name for member in found.members]]

is_again = (folder / "failed").exists()
said = {"restarts": os.environ["TORCHELASTIC_RESTART_COUNT"], "node": world.node}
said["without"] = meet("0")
if not is_again:
    # Torch's agents keep their store over a restart, where torch itself cannot make a group for a
    # second time: it finds the addresses of the first (pytorch/pytorch#135712).
    distributed.init_process_group("gloo")
    said["with"] = meet("1")
(folder / f"{'again' if is_again else 'first'}-{world.rank}").write_text(json.dumps(said))
if not is_again:
    distributed.barrier()
    if world.rank == 3:
        (folder / "failed").touch()
        sys.exit(1)
    time.sleep(1000)  # Until the agent ends it.
"""


def test_ranks_of_torchrun_meet_and_meet_again_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(_RANK)
    endpoint = f"{HOST}:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=meet"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", "--local-addr", HOST]
    command += [str(tmp_path / "rank.py"), str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=200)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    secrets = []
    for life in ("first", "again"):
        said = [json.loads((tmp_path / f"{life}-{rank}").read_text()) for rank in range(4)]
        assert [each["node"] for each in said] == [0, 0, 1, 1]
        for which in {"without", "with"} & set(said[0]):
            assert len({json.dumps(each[which]) for each in said}) == 1
            assert len(said[0][which][1]) == 2
            secrets.append(said[0][which][0])
    assert len(set(secrets)) == len(secrets) == 3
    # Why no number of restarts is part of any key: the nodes do not count alike.
    assert {each["restarts"] for each in said} == {"0", "1"}
