"""One rank of a job on many nodes: goes through batches and writes down what it saw.

    python benchmarks/cluster_worker.py TASK.json

Each step is a line in `steps/ATTEMPT-RANK.jsonl`: the hash of its samples, how long the loop waited
for it, where the stream stands after it. The end is `ends/ATTEMPT-RANK.json`. A rank that is killed
leaves the lines of the steps that it had finished.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import penstock
from benchmarks.cluster_data import is_right
from penstock.order import StreamHash
from penstock.testing.servers import S3Access

HOLD_S = 60.0
POLL_S = 0.01


class Rank:
    def __init__(self, task: dict) -> None:
        self.task = task
        self.folder = Path(task["folder"])
        self.number = int(os.environ.get("RANK", "0"))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.name = f"{task['attempt'] + restarts}-{self.number}"
        self.num_wrong = 0
        self.step_ended_s = 0.0
        self.agree: Callable[[], None] = lambda: None
        for part in ("steps", "ends"):
            (self.folder / part).mkdir(exist_ok=True, parents=True)

    def loader(self) -> penstock.Loader:
        task = self.task
        dataset = penstock.open(task["uri"], store=S3Access(endpoint=task["endpoint"]).options)
        tiers = []
        if task["memory"]:
            tiers.append(penstock.Memory(task["memory"]))
        if task["disk"]:
            place = self.folder / "tiers" / socket.gethostname()
            place.mkdir(parents=True, exist_ok=True)
            tiers.append(penstock.Disk(place, task["disk"]))
        loader = penstock.Loader(
            dataset,
            global_batch_size=task["global_batch_size"],
            epochs=task["epochs"],
            seed=task["seed"],
            tiers=tiers,
            look_ahead=task["look_ahead"],
            threads=task["threads"],
            output="numpy",
            **task["options"] | self.meeting(),
        )
        if (state := self.start()) is not None:
            loader.load_state_dict(state)
        return loader

    def meeting(self) -> dict:
        """Where nodes meet, if that is not torch's to say: a new place for each attempt."""
        where = self.task["options"].get("peers")
        return {"peers": f"{where}/{self.task['attempt']}"} if isinstance(where, str) else {}

    def start(self) -> dict | None:
        """Where to go on: what was asked for, or the last checkpoint of a restarted job."""
        with contextlib.suppress(OSError):
            return json.loads((self.folder / "checkpoint.json").read_text())
        return self.task["state"]

    def run(self) -> None:
        with self.lockstep(), self.loader() as loader:
            with (self.folder / "steps" / f"{self.name}.jsonl").open("w") as lines:
                began_s = time.monotonic()
                for batch in self.replayed(loader) if self.task["is_dry"] else loader:
                    wait_s = time.monotonic() - began_s
                    line = self.line(batch, wait_s) | {"state": loader.state_dict()}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
                    self.finish_step(batch, line)
                    began_s = time.monotonic()
            self.end(loader)

    def replayed(self, loader: penstock.Loader) -> Iterator[penstock.Batch]:
        """Yield the first batch as often as there are batches, from memory."""
        steps = len(loader) // self.task["epochs"]
        batch = next(iter(loader))
        for number in range(len(loader)):
            batch.epoch, batch.step = divmod(number, steps)
            yield batch

    def line(self, batch: penstock.Batch, wait_s: float) -> dict:
        seen = StreamHash().update(batch.epoch, batch.positions, batch.ids, batch.mask)
        if self.task["verify"]:
            pairs = zip(batch.ids.tolist(), batch["bin"], strict=True)
            self.num_wrong += sum(not is_right(number, payload) for number, payload in pairs)
        return {
            "epoch": batch.epoch,
            "step": batch.step,
            "total": seen.total,
            "num": seen.num_samples,
            "wait_s": wait_s,
            "at_s": time.time(),
        }

    def finish_step(self, batch: penstock.Batch, line: dict) -> None:
        """Do the step's own work, agree with the others, and save where the job stands."""
        self.work()
        self.agree()
        if self.task["is_lockstep"] and self.number == 0:
            partial = self.folder / "checkpoint.partial"
            partial.write_text(json.dumps(line["state"]))
            partial.rename(self.folder / "checkpoint.json")
        if self.task["hold_at"] == [batch.epoch, batch.step]:
            self.hold()

    def work(self) -> None:
        """Let the time of a step pass."""
        now_s = time.monotonic()
        paced_s = self.step_ended_s if self.task["is_paced"] and self.step_ended_s else now_s
        self.step_ended_s = paced_s + self.task["step_s"]
        time.sleep(max(0.0, self.step_ended_s - now_s))

    def hold(self) -> None:
        """Wait for the word to go on; meanwhile something is done to some node."""
        deadline_s = time.monotonic() + HOLD_S
        while not (self.folder / "go").exists():
            assert time.monotonic() < deadline_s, "nobody said go"
            time.sleep(POLL_S)
        self.step_ended_s = 0.0

    @contextlib.contextmanager
    def lockstep(self) -> Iterator[None]:
        """Let ranks wait for each other after each step, as training does."""
        if not self.task["is_lockstep"]:
            if self.task["options"].get("peers") is True:
                import torch.distributed  # its store is where nodes meet
            yield
            return
        import torch

        torch.distributed.init_process_group("gloo")
        value = torch.zeros(1)
        self.agree = lambda: torch.distributed.all_reduce(value)
        yield
        torch.distributed.destroy_process_group()

    def end(self, loader: penstock.Loader) -> None:
        stats = loader.stats()
        seen = {
            "sources": {name: source.size_bytes for name, source in stats.sources.items()},
            "store_bytes": stats.store_bytes,
            "bound_bytes": stats.bound_bytes,
            "elapsed_s": stats.elapsed_s,
            "stall_s": stats.stall_s,
            "tiers": [[tier.capacity_bytes, tier.held_bytes] for tier in stats.tiers],
            "rank": self.number,
            "num_wrong": self.num_wrong,
            "cpu_s": time.process_time(),
            "summary": str(stats),
        }
        (self.folder / "ends" / f"{self.name}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # `Job.stacks` asks where a rank hangs
    Rank(json.loads(Path(sys.argv[1]).read_text())).run()
