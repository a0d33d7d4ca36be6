"""Tiers as a subject: whatever happens to their files, a loader delivers what the store holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

import penstock
from penstock.errors import PenstockError
from testkit.fuzz.files import digest_of
from testkit.fuzz.mutate import mutated, overwritten
from testkit.fuzz.subjects import Subject, WrongDataError


class SeenError(Exception):
    """Damage to a tier that reached the training loop as an error."""


class TierFilesSubject:
    """A disk tier of a small set, damaged between two runs or under a running one."""

    def __init__(self, name: str, *, is_open: bool) -> None:
        self.name = name
        self._is_open = is_open
        self._data, self._tier = Path(), Path()
        self._values: dict[int, str] = {}

    def prepare(self, folder: Path) -> None:
        """Write a set and fill a tier with it."""
        self._data, self._tier = folder / "data", folder / "tier"
        self._tier.mkdir()
        rng = np.random.default_rng(5)
        with penstock.Writer(self._data, shard_size="400KB") as writer:
            for i in range(24):
                # Samples that are units of their own, and small ones that share units.
                size = 70_000 if i % 3 == 0 else 900
                writer.write({"bin": rng.bytes(size), "cls": i})
        self._values = self._read(self._tier, lambda: None)

    def _read(self, tier: Path, between: Callable[[], None]) -> dict[int, str]:
        dataset = penstock.open(self._data)
        values: dict[int, str] = {}
        with penstock.Loader(
            dataset,
            batch_size=4,
            epochs=2,
            output="numpy",
            threads=1,
            look_ahead="150KB",
            tiers=[penstock.Disk(tier, "10MB")],
        ) as loader:
            for number, batch in enumerate(loader):
                if number == 1:
                    between()
                for row, i in enumerate(batch.ids.tolist()):
                    value = digest_of([np.asarray(batch["bin"][row]), int(batch["cls"][row])])
                    if values.setdefault(i, value) != value:
                        raise WrongDataError(f"sample {i} differs between two epochs")
        return values

    def try_one(self, random: Random, folder: Path) -> None:
        """Damage one file of the tier and read two epochs."""
        tier = folder / "tier"
        shutil.copytree(self._tier, tier)
        damage = partial(self._damage, random, tier)
        if not self._is_open:
            damage()
        try:
            values = self._read(tier, damage if self._is_open else lambda: None)
        except PenstockError as error:
            raise SeenError(f"{type(error).__name__}: {error}") from error
        if values != self._values:
            wrong = [i for i, value in values.items() if value != self._values.get(i)]
            raise WrongDataError(f"{len(wrong)} samples are wrong, the first is {wrong[:1]}")

    def _damage(self, random: Random, tier: Path) -> None:
        paths = sorted(path for path in tier.rglob("*") if path.is_file() and path.stat().st_size)
        if not paths:
            return
        path = random.choice(paths)
        data = path.read_bytes()
        # Half of it as a disk does, in place; half as a careless program does.
        changed = (overwritten if random.random() < 0.5 else mutated)(random, data)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, len(changed))
            os.pwrite(descriptor, changed, 0)
        finally:
            os.close(descriptor)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    name: partial(TierFilesSubject, name, is_open=is_open)
    for name, is_open in (("tier-closed", False), ("tier-open", True))
}
