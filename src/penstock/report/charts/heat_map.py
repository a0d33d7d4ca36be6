"""A matrix of numbers as colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.report.charts.axes import Axis
from penstock.report.charts.columns import column_spec

CELLS_MAX = 100_000
"""Cells of a map: with more, a browser takes seconds to draw it and cells become invisible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A cell for each pair of a row and a column, such as of a rank and a step."""

    title: str
    """What is drawn."""
    reading: str
    """One sentence: what to see here."""
    column: Axis
    """What columns are; only its name is used."""
    columns: Sequence[str]
    """Their names, from left to right."""
    row: Axis
    """What rows are; only its name is used."""
    rows: Sequence[str]
    """Their names, from the top down."""
    value: Axis
    """What colours mean; `low` and `high` bound the colours."""
    values: npt.NDArray[Any]
    """Numbers, rows by columns; NaN leaves a cell empty."""
    is_half: bool = False
    """Whether two such charts stand side by side where the page is wide."""

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        if np.shape(self.values) != shape:
            raise ValueError(
                f"chart {self.title!r} has {shape[0]} rows and {shape[1]} columns, its values have "
                f"the shape {np.shape(self.values)}"
            )
        if not 1 <= self.values.size <= CELLS_MAX:
            raise ValueError(
                f"chart {self.title!r} has {self.values.size:,} cells; a map has 1 to "
                f"{CELLS_MAX:,}: join neighbouring rows or columns"
            )

    def spec(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it."""
        return {
            "kind": "heat map",
            "column": self.column.spec(),
            "columns": list(self.columns),
            "row": self.row.spec(),
            "rows": list(self.rows),
            "value": self.value.spec(),
            "values": column_spec(np.ravel(self.values), log=self.value.log),
        }

    def num_rows(self) -> int:
        """Return the rows of the chart's table, where it is not too wide for one."""
        return len(self.rows) if len(self.columns) <= 40 else CELLS_MAX

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the chart's numbers as a head and rows."""
        matrix = np.asarray(self.values, np.float64).tolist()
        rows = [
            [name, *map(self.value.text, row)] for name, row in zip(self.rows, matrix, strict=True)
        ]
        return [f"{self.row.name} \\ {self.column.name}", *self.columns], rows
