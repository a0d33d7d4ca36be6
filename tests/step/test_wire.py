"""What a plan says that it sends is what the interface of a host has sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.network import Link, Network, can_make_networks

ROOT = Path(__file__).parents[2]
HEADERS = 0.01
"""Of TCP and of gloo, and the barriers around the steps."""


def test_predicted_bytes_are_those_of_the_interface() -> None:
    reason = can_make_networks("bridge")
    if reason is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    # Without a limit packets go out as small as they come, and headers grow to a few percent.
    with Network({"r0": Link(rate="1gbit"), "r1": Link(rate="1gbit")}) as network:
        env = {"MASTER_ADDR": network.host("r0").address, "MASTER_PORT": "29513", "WORLD_SIZE": "2"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        ranks = [
            network.host(f"r{rank}").popen(
                [sys.executable, "-m", "tests.step.wire_worker"],
                env=env | {"RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    for text in said:
        for name, (predicted, counted) in json.loads(text.splitlines()[-1]).items():
            assert predicted <= counted <= (1 + HEADERS) * predicted, f"{name}: {text}"
