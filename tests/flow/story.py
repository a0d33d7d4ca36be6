"""A flow that has seen many ordinary answers, told what happens next line by line."""

from __future__ import annotations

from penstock.flow import Action, Arrived, Consumed, Fetch, Flow, FlowBudget, Tick, Wanted

LATENCY_S = 0.02


class Story:
    """The next fetches can be made late."""

    def __init__(self, *sources: str, pace_s: float = 1.0, num_seen: int = 200) -> None:
        self.flow = Flow(budget=FlowBudget(stage_bytes_max=1 << 30))
        self.sources = sources or ("store",)
        self.now_s = 0.0
        self.number = self.step = 0
        self.pace_s = pace_s
        self.see(num_seen)

    def see(self, num: int, *sources: str, latency_s: float = LATENCY_S) -> None:
        """Let a source give some ordinary answers, one a step."""
        kept, self.sources = self.sources, sources or self.sources
        for _ in range(num):
            self.want(1)
            self.now_s += latency_s
            self.arrive(self.number - 1)
            self.now_s += max(0.0, self.pace_s - latency_s)
            self.consume()
        self.sources = kept

    def want(self, num: int, *, ahead: int = 0) -> list[int]:
        numbers = list(range(self.number, self.number + num))
        fetches = tuple(
            Fetch(number=n, step=self.step + ahead, size_bytes=1000, sources=self.sources)
            for n in numbers
        )
        self.number += num
        self.flow.on(Wanted(fetches=fetches, at_s=self.now_s))
        return numbers

    def arrive(self, number: int, attempt: int = 0) -> list[Action]:
        return self.flow.on(Arrived(number=number, attempt=attempt, at_s=self.now_s))

    def consume(self) -> list[Action]:
        self.step += 1
        return self.flow.on(Consumed(step=self.step - 1, at_s=self.now_s))

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass as a loader would: with a tick whenever the flow wants one."""
        end_s = self.now_s + seconds
        actions: list[Action] = []
        while (wake_s := self.flow.wake_s) is not None and wake_s <= end_s:
            self.now_s = max(self.now_s, wake_s)
            actions += self.flow.on(Tick(at_s=self.now_s))
        self.now_s = end_s
        return actions
