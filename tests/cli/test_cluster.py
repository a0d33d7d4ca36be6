"""`penstock cluster`: real servers, the real command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.cli.cluster_page import page_of
from penstock.cli.screen import plain
from penstock.engine.node.survey import NodeTraffic, NodeView, RunView
from penstock.engine.peers.base import Address, Shelves
from penstock.engine.peers.node_messages import ListedRun, RunMember
from penstock.engine.peers.run_files import write_run_file
from penstock.engine.peers.server import PeerServer
from penstock.engine.peers.status import (
    LinkStatus,
    NodeStatus,
    ReadCounts,
    RunStatus,
    TierStatus,
    as_dict,
)

Run = Callable[..., subprocess.CompletedProcess[str]]
RUN, SECRET = b"r" * 16, b"s" * 32


def status_of(name: str, *, peer: str, suspects: tuple[str, ...] = ()) -> NodeStatus:
    run = RunStatus(
        run=RUN.hex(),
        dataset="s3://bucket/train/",
        reads=ReadCounts(tier_bytes=60, peer_bytes=30, store_bytes=10, num_ranks=2),
        links=(LinkStatus(peer=peer, in_bytes=3_000_000),),
        suspects=suspects,
        log=(f"{name} has seen much",),
    )
    tiers = (TierStatus(kind="memory", capacity_bytes=4 * 10**9, held_bytes=10**9),)
    return NodeStatus(name=name, host=f"host-{name}", tiers=tiers, runs=(run,))


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[RunMember]]:
    """Two nodes that answer and one that does not, and the file by which they are found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_NODE", "none")
    with ExitStack() as stack:
        found = []
        for node, (name, peer) in enumerate((("a", "b"), ("b", "a"))):
            status = as_dict(status_of(name, peer=peer, suspects=("c",)))
            server = PeerServer(
                name=name,
                shelves=Shelves(),
                secrets={RUN: SECRET}.get,
                bind=[Address(host="127.0.0.1", port=0)],
                status=lambda *_, status=status: status,
            )
            server.start()
            stack.callback(server.stop)
            port = server.address.port
            found.append(
                RunMember(
                    name=name, host=f"host-{name}", node=node, addresses=(("127.0.0.1", port),)
                )
            )
        found.append(RunMember(name="c", host="host-c", node=2, addresses=(("127.0.0.1", 1),)))
        write_run_file(run_id=RUN, secret=SECRET, members=found, dataset="s3://bucket/train/")
        yield found


def test_a_run_is_found_and_shown(penstock: Run, members: list[RunMember], tmp_path: Path) -> None:
    answer = penstock("cluster", "--once", XDG_RUNTIME_DIR=str(tmp_path), PENSTOCK_NODE="none")
    assert answer.returncode == 0, answer.stderr
    assert "2 of 3 nodes answer" in answer.stdout
    assert "s3://bucket/train/" in answer.stdout
    assert "1 GB  4 GB      ██▌" in answer.stdout
    assert "60%   30%   10%" in answer.stdout
    assert "0 host-a         → 1 host-b" in answer.stdout
    assert "suspect  2 host-c does not answer 0 host-a, 1 host-b" in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_programs_get_all_of_it(penstock: Run, members: list[RunMember], tmp_path: Path) -> None:
    (address,) = members[1].addresses
    words = ("cluster", f"{address[0]}:{address[1]}", "--json")
    answer = penstock(*words, XDG_RUNTIME_DIR=str(tmp_path), PENSTOCK_NODE="none")
    told = json.loads(answer.stdout)
    assert (told["run"], [node["name"] for node in told["nodes"]]) == (RUN.hex(), ["b"])
    assert told["nodes"][0]["status"]["tiers"][0]["held_bytes"] == 10**9
    assert told["links"] == [{"from": "a", "to": "b", "bytes": 3_000_000, "bytes_per_s": 0.0}]


def test_no_run_is_an_error_with_a_way_out(penstock: Run, tmp_path: Path) -> None:
    answer = penstock("cluster", XDG_RUNTIME_DIR=str(tmp_path), PENSTOCK_NODE="none")
    assert answer.returncode == 1
    assert "no run of yours was found" in answer.stderr


def test_a_large_run_fits_80_columns() -> None:
    long = "a-host-with-a-very-long-name.example.com"
    nodes = [
        NodeView(
            member=RunMember(name=f"{n:032x}", host=f"{n}-{long}", node=n),
            status=status_of(f"{n:032x}", peer="x"),
            run=RunStatus(log=("word " * 60,), lost=("x" * 32,)),
            error="",
        )
        for n in range(100)
    ]
    nodes[7] = NodeView(
        member=nodes[7].member, status=None, run=RunStatus(), error="no connection " * 20
    )
    links = [
        NodeTraffic(source=a.member.name, to=b.member.name, size_bytes=10**12, bytes_per_s=1e9)
        for a in nodes[:5]
        for b in nodes[:5]
    ]
    run = ListedRun(run_id=RUN, secret=SECRET, dataset="s3://" + "bucket/" * 30)
    view = RunView(run=run, nodes=tuple(nodes), links=tuple(links), at_s=0.0)
    page = "\n".join(plain(line).rstrip() for line in page_of(view))
    assert max(map(len, page.splitlines())) <= 80
    assert "99 of 100 nodes answer" in page


def test_on_a_terminal_it_is_live_until_ctrl_c(
    on_terminal: Callable[..., str], members: list[RunMember], tmp_path: Path
) -> None:
    # Interrupted by itself after the second look, since a terminal's keys are out of reach here.
    code = (
        "import sys, _thread\n"
        "from penstock.cli import cluster\n"
        "from penstock.cli.main import main\n"
        "from penstock.engine.node.survey import RunSurvey\n"
        "cluster._EVERY_S = 0.0\n"
        "looks, look = [], RunSurvey.look\n"
        "def counted(self):\n"
        "    looks.append(1)\n"
        "    if len(looks) > 2: raise KeyboardInterrupt\n"
        "    return look(self)\n"
        "RunSurvey.look = counted\n"
        "code = main(['cluster'])\n"
        "print('ended with', code, 'after', len(looks))\n"
    )
    shown = on_terminal(code, XDG_RUNTIME_DIR=str(tmp_path), PENSTOCK_NODE="none", COLUMNS="80")
    assert "ended with 0 after 3" in shown
    assert shown.count("nodes answer") == 3  # two looks, and the last page again
    assert "\x1b[?1049h" in shown  # drawn beside what the terminal had, which comes back
