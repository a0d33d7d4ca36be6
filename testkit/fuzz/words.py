"""Subjects that are texts and small values: saved states, schedules, files of settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import penstock
from penstock.machine import load_machine, machine_toml
from penstock.order import GlobalOrder
from penstock.simulate.scenario import load_scenario
from penstock.step.program.schedule import apply, read_schedule
from testkit.fuzz.mutate import mutated, mutated_json
from testkit.fuzz.subjects import Subject, WrongDataError
from testkit.programs import random_program
from testkit.rewrites import applied, random_rewrite

EXAMPLES = Path(__file__).parents[2] / "examples"


class States:
    """A loader's saved state."""

    name = "state"

    def prepare(self, folder: Path) -> None:
        """Save a state in mid-epoch."""
        np.save(folder / "x.npy", np.arange(40, dtype=np.int32).reshape(20, 2))
        self._dataset = penstock.open(folder)
        with self._loader() as loader:
            rows = iter(loader)
            next(rows)
            next(rows)
            self._state = loader.state_dict()
            self._next = next(rows).ids.tolist()

    def _loader(self) -> penstock.Loader:
        return penstock.Loader(self._dataset, batch_size=3, epochs=3, seed=5, output="numpy")

    def try_one(self, random: Random, folder: Path) -> None:
        """Load a damaged state and go on from it."""
        data = mutated_json(random, json.dumps(self._state).encode())
        if random.random() < 0.2:
            data = mutated(random, data)
        try:
            state: Any = json.loads(data)
        except (ValueError, RecursionError):
            return  # nothing that a user could give to a loader
        with self._loader() as loader:
            loader.load_state_dict(state)
            found = loader.state_dict()
            ids = next(iter(loader)).ids.tolist()
        order = GlobalOrder(num_samples=20, seed=5)
        start = found["position"]
        if start <= 17 and ids != order.ids(found["epoch"], start, start + 3).tolist():
            raise WrongDataError(f"{state} goes on with {ids}")


class Schedules:
    """The text of a schedule, and a program that it was made for."""

    name = "schedule"

    def prepare(self, folder: Path) -> None:
        """Nothing is needed: programs are random as well."""

    def try_one(self, random: Random, folder: Path) -> None:
        """Read a damaged schedule and apply it."""
        sample = random_program(random)
        program = sample.program
        for _ in range(4):
            step = random_rewrite(random, program)
            program = (None if step is None else applied(program, step)) or program
        text = program.script() or "split('g')\n"
        damaged = mutated(random, text.encode()).decode(errors="replace")
        apply(sample.program, read_schedule(damaged))


class Settings:
    """A file of settings that a person may edit."""

    def __init__(self, name: str, text: Callable[[], str], load: Callable[[Path], Any]) -> None:
        self.name = name
        self._make, self._load = text, load
        self._text = b""

    def prepare(self, folder: Path) -> None:
        """Keep the good text."""
        self._text = self._make().encode()

    def try_one(self, random: Random, folder: Path) -> None:
        """Load a damaged file."""
        path = folder / f"{self.name}.toml"
        path.write_bytes(mutated(random, self._text))
        self._load(path)


def _machine() -> str:
    scenario = load_scenario(sorted((EXAMPLES / "scenarios").glob("*.toml"))[0])
    return machine_toml(scenario.machine)


def _scenario() -> str:
    return sorted((EXAMPLES / "scenarios").glob("*.toml"))[0].read_text()


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "state": States,
    "schedule": Schedules,
    "machine": partial(Settings, "machine", _machine, load_machine),
    "scenario": partial(Settings, "scenario", _scenario, load_scenario),
}
