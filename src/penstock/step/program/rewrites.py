"""The rewrites as methods of a program: `adam.split("g").sink("g.gather", below="w")`.

Each is one of `passes`, by name; what it does and when it may is said there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.step.program.nodes import Attr, Program, Rewrite

__all__ = ["Rewrites"]


class Rewrites:
    """What can be made of a program. All of it is `apply` with a name."""

    history: tuple[Rewrite, ...]
    apply: Callable[..., Program]

    def script(self) -> str:
        """Return the rewrites that made this program as text: `schedule.apply` makes it again."""
        from penstock.step.program.schedule import schedule_text

        return schedule_text(self.history)

    # -- what is computed where --------------------------------------------------------------

    def split(self, name: str, **options: Any) -> Program:
        """Make a reduce-scatter and an all-gather of an all-reduce; halve a send or a load."""
        return self.apply("split", name, **options)

    def sink(self, *names: str, below: str | None = None) -> Program:
        """Move gathers or all-reduces below what reads them."""
        return self.apply("sink", *names, **_said(below=below))

    def hoist(self, name: str, *, above: str | None = None) -> Program:
        """Move a gather, an all-reduce or a slice above what made its operand."""
        return self.apply("hoist", name, **_said(above=above))

    def keep_sliced(self, *names: str, axis: str | None = None, dim: int | None = None) -> Program:
        """Keep states in slices."""
        return self.apply("keep_sliced", *names, **_said(axis=axis, dim=dim))

    def dead(self, *names: str) -> Program:
        """Take away what nobody reads."""
        return self.apply("dead", *names)

    def hier(self, name: str, *, inner: str | None = None, dim: int = 0) -> Program:
        """Do a collective along two axes one axis after the other."""
        return self.apply("hier", name, **_said(inner=inner, dim=dim or None))

    def factor(self, axis: str, *into: tuple[str, int]) -> Program:
        """Make several axes of one."""
        return self.apply("factor", axis, *into)

    def reshard(self, name: str, *, at: str | None = None) -> Program:
        """Gather again for a later reader, instead of holding it until then."""
        return self.apply("reshard", name, **_said(at=at))

    def wire(self, *names: str, dtype: str | None = "bf16") -> Program:
        """Send fewer bits than values have; the program is approximate then."""
        return self.apply("wire", *names, dtype=dtype)

    # -- how it is carried out -----------------------------------------------------------------

    def fuse(self, *names: str, **options: Any) -> Program:
        """Carry nodes out as one kernel."""
        return self.apply("fuse", *names, **options)

    def chunk(self, *args: Any, **options: Any) -> Program:
        """Carry nodes out chunk by chunk."""
        return self.apply("chunk", *args, **options)

    def overlap(self, *args: Any, **options: Any) -> Program:
        """Let nodes that do not need each other go on at the same time."""
        return self.apply("overlap", *args, **options)

    def bucket(self, *args: Any, **options: Any) -> Program:
        """Send several small values as one."""
        return self.apply("bucket", *args, **options)

    def ring(self, *args: Any, **options: Any) -> Program:
        """Multiply matrices part by part while the parts go round."""
        return self.apply("ring", *args, **options)

    def rotate(self, *args: Any, **options: Any) -> Program:
        """Do something iterations ahead: load early, gather under the next forward."""
        return self.apply("rotate", *args, **options)

    def priority(self, *args: Any, **options: Any) -> Program:
        """Say which communication goes first."""
        return self.apply("priority", *args, **options)

    def priority_by_use(self, lane: str) -> Program:
        """Let a lane do first what is needed first."""
        return self.apply("priority_by_use", lane)

    def algo(self, *names: str, way: str | None) -> Program:
        """Say by which way collectives go round: direct, ring or native."""
        return self.apply("algo", *names, way=way)


def _said(**options: Attr) -> dict[str, Attr]:
    """Return the options that were given, so that a schedule has nothing else."""
    return {name: value for name, value in options.items() if value is not None}
