"""Subjects: kinds of input, each with a good one to damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Protocol


class WrongDataError(Exception):
    """What was read is not what was written, and nobody said so."""


class Subject(Protocol):
    """One kind of input."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make a good input; once in each worker."""
        ...

    def try_one(self, random: Random, folder: Path) -> None:
        """Damage a copy of it below an empty folder and read that.

        Returns if it can be read, raises an error of `penstock.errors` if it is refused. Anything
        else that is raised is a finding.
        """
        ...


def all_subjects() -> dict[str, Callable[[], Subject]]:
    """Return how to make each subject, by name."""
    from testkit.fuzz import files, peers, tiers, words

    return {**files.SUBJECTS, **tiers.SUBJECTS, **words.SUBJECTS, **peers.SUBJECTS}
