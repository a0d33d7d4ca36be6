"""Metrics in the text format of Prometheus, and back.

Pure: rows in, text out. Names follow the conventions of Prometheus: base units, and `_total` for a
number that only grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One number, with labels."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Numbers of one name."""

    name: str
    kind: str
    """gauge or counter."""
    help: str
    rows: tuple[MetricRow, ...]

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.kind in ("gauge", "counter"), self.kind
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name


def one(name: str, kind: str, help_text: str, value: float) -> Metric:
    """Return a metric that is a single number."""
    return Metric(name=name, kind=kind, help=help_text, rows=(MetricRow(value=value),))


def text_of(metrics: Iterable[Metric]) -> str:
    r"""Return metrics as Prometheus reads them.

    >>> print(text_of([Metric(name="held_bytes", kind="gauge", help="Bytes held.",
    ...     rows=(MetricRow(value=3, labels={"uri": 'a"b\\c'}),))]), end="")
    # HELP penstock_held_bytes Bytes held.
    # TYPE penstock_held_bytes gauge
    penstock_held_bytes{uri="a\"b\\c"} 3
    """
    lines = []
    for metric in metrics:
        name = f"penstock_{metric.name}"
        text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {metric.kind}"]
        lines += [f"{name}{_labels(row.labels)} {_number(row.value)}" for row in metric.rows]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    # File names may hold bytes that are not text; they must not break the page.
    value = value.encode(errors="replace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def rows_of(text: str) -> Iterator[tuple[str, MetricRow]]:
    r"""Yield the name (without `penstock_`) and the row of every metric of ours in a page.

    >>> list(rows_of('penstock_held_bytes{uri="a\\"b"} 3\nother_bytes 4\n'))
    [('held_bytes', MetricRow(value=3.0, labels={'uri': 'a"b'}))]
    """
    for name, labels, value in _ROW.findall(text):
        found = {label: _ESCAPE.sub(_unescaped, inner) for label, inner in _LABEL.findall(labels)}
        yield name, MetricRow(value=float(value), labels=found)


_TEXT = r'"((?:[^"\\\n]|\\.)*)"'
_LABEL = re.compile(r"(\w+)=" + _TEXT)
_ROW = re.compile(r'^penstock_(\w+)(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})? (\S+)', re.MULTILINE)
_ESCAPE = re.compile(r"\\(.)")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
