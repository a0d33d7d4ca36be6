"""Two nodes, one cache: each byte comes from the store once, whoever needs it.

    python examples/torchrun_peers.py

starts two agents of torchrun on this machine, as two nodes would each start one:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/torchrun_peers.py --data s3://bucket/train/ --scratch /scratch

Half of the data set is at home on each node. A node reads its half from the store, once, and keeps
it; the other half it asks the other node for. The hash of all samples in order is the same as on
one node.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.order import StreamHash

EPOCHS, GLOBAL_BATCH_SIZE = 3, 16


def train(data: str, scratch: Path) -> None:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4096, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dataset, seen = penstock.open(data), StreamHash()
    with penstock.Loader(
        dataset,
        global_batch_size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        seed=7,
        tiers=[penstock.Disk(scratch, "100MB")],
        peers=True,
    ) as loader:
        for batch in loader:
            losses = (model(batch["x"]).squeeze(1) - batch["y"]).square()
            optimizer.zero_grad()
            (losses * batch.mask).mean().backward()
            optimizer.step()
            seen = seen.update(batch.epoch, batch.positions, batch.ids, batch.mask)
        show(dataset, seen, loader.stats())
    distributed.destroy_process_group()


def show(dataset: penstock.Dataset, seen: StreamHash, stats: penstock.Stats) -> None:
    """The first rank prints what all have done."""
    parts = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, (seen, stats))
    if distributed.get_rank() != 0:
        return
    print(stats)
    store_bytes = sum(part.store_bytes for _, part in parts)
    peer_bytes = sum(part.peer_bytes for _, part in parts)
    print(f"all nodes: {store_bytes / dataset.size_bytes:.2f} times the data set from the store,")
    print(f"           {peer_bytes / dataset.size_bytes:.2f} times from each other")
    for part, _ in parts[1:]:
        seen = seen.merge(part)
    print(f"{seen.num_samples} samples, {seen.hexdigest()}", flush=True)


def start_two_nodes(folder: Path) -> None:
    """Do what would be done on two machines: one agent each, one disk each."""
    with penstock.Writer(folder / "data", format="npy", shard_size="1MB") as writer:
        for number in range(192):
            values = np.random.default_rng(number).normal(size=4096).astype(np.float32)
            writer.write({"x": values, "y": values[:8].sum()})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=peers"]
    command += ["--local-addr=127.0.0.1", __file__, "--data", str(folder / "data"), "--scratch"]
    env = {"GLOO_SOCKET_IFNAME": "lo", "PENSTOCK_INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
    agents = []
    for node in range(2):
        (folder / f"disk{node}").mkdir()
        agent = subprocess.Popen([*command, str(folder / f"disk{node}")], env={**os.environ, **env})
        agents.append(agent)
    for agent in agents:
        agent.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    if options.data:
        train(options.data, options.scratch)
    else:
        with tempfile.TemporaryDirectory() as made:
            start_two_nodes(Path(made))
