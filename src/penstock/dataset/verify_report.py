"""What `verify` says: problems, each one clear sentence, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["index", "object", "format", "read", "checksum", "block", "decode"]
_STAGES = ("index", "object", "format", "read", "checksum", "block", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    kind: Kind
    """What did not hold: the index itself, an object, its format, a read, a checksum, a block of
    samples, or the decoding of a field."""
    message: str
    """The whole sentence: object, place, sample, expected and found."""
    object: str = ""
    """Key of the object, where one is concerned."""
    offset: int | None = None
    """Place in the object."""
    sample_id: int | None = None
    """Number of the sample in the data set; the first of several."""
    key: str | None = None
    """The sample's own name."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """How far a verification has come."""

    num_samples: int
    """Samples to check in all."""
    samples_done: int = 0
    """Samples that were checked, also those that could not be read."""
    size_bytes: int = 0
    num_problems: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked, and what is wrong."""

    num_samples: int
    """Samples that were read."""
    num_objects: int
    """Objects that the index names."""
    size_bytes: int
    """Bytes of samples that were read."""
    num_checksums: int
    """Samples (or blocks) compared with a checksum; 0 where the index has none."""
    num_problems: int
    """Problems in all, also those that are not kept."""
    problems: tuple[Problem, ...]
    """The problems, as many as were asked for: of the index, of objects, of samples."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_problems == 0


Report = Callable[[VerifyProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the check of some samples has given."""

    num_samples: int = 0
    size_bytes: int = 0
    num_checksums: int = 0
    problems: tuple[Problem, ...] = ()


@dataclass(slots=True, kw_only=True)
class Tally:
    """Findings added up; keeps a bounded number of problems."""

    problems_max: int
    num_samples: int = 0
    size_bytes: int = 0
    num_checksums: int = 0
    num_problems: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, findings: Findings) -> None:
        """Add what one piece of work has found."""
        self.num_samples += findings.num_samples
        self.size_bytes += findings.size_bytes
        self.num_checksums += findings.num_checksums
        self.add_problems(findings.problems)

    def add_problems(self, problems: Iterable[Problem]) -> None:
        """Add problems; those beyond the bound are counted only."""
        for problem in problems:
            self.num_problems += 1
            if len(self.problems) < self.problems_max:
                self.problems.append(problem)

    def report(self, num_objects: int) -> VerifyReport:
        """Return all of it, problems in the order of what they concern."""
        found = sorted(
            self.problems,
            key=lambda p: (_STAGES.index(p.kind) > 2, p.sample_id or 0, _STAGES.index(p.kind)),
        )
        return VerifyReport(
            num_samples=self.num_samples,
            num_objects=num_objects,
            size_bytes=self.size_bytes,
            num_checksums=self.num_checksums,
            num_problems=self.num_problems,
            problems=tuple(found),
        )
