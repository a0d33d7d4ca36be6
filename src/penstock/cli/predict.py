"""`penstock predict`: what other scales, caches, batches and stores would make of a traced run."""

from __future__ import annotations

import argparse
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from penstock.cli.options import add_json
from penstock.cli.screen import Screen, print_json
from penstock.errors import OptionError
from penstock.report.model import Forecast, RunModel, WhatIf, calibrate
from penstock.report.model.resources import ResourceNeed, needs
from penstock.report.model.scaling import takeovers
from penstock.trace import read_trace
from penstock.units import bytes_of, show_bytes, show_seconds

_EXAMPLE = """\
Every option takes several values with commas between them: all combinations are
predicted. What is not given stays as it was in the run.

Examples
  penstock predict runs/today --nodes 1,2,4,8,16 --ranks-per-node 8
  penstock predict runs/today --cache 0,100GB,1TB --store-bandwidth 2GB
  penstock predict runs/small runs/busy --workers 4,8,16 --needs --json
"""


def _count(word: str) -> int:
    return int(word)


def _bytes_s(word: str) -> float:
    return float(bytes_of(word.removesuffix("/s")))


def _seconds(word: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|µs|ms|s)\s*", word)
    if match is None:
        raise ValueError(word)
    return float(match[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


_OPTIONS: dict[str, tuple[str, str, Callable[[str], Any], str]] = {
    "--nodes": ("nodes", "N", _count, "nodes of the job"),
    "--ranks-per-node": ("ranks_per_node", "N", _count, "ranks on each node"),
    "--batch-size": ("batch_size", "N", _count, "samples a step and rank"),
    "--workers": ("workers", "N", _count, "workers of a rank that make batches"),
    "--prefetch-factor": ("prefetch_factor", "N", _count, "batches ahead of a worker (torch)"),
    "--epochs": ("epochs", "N", _count, "how often the data set is read"),
    "--cores": ("cores", "N", _count, "cores of a node"),
    "--cache": ("memory_cache_bytes", "SIZE", bytes_of, "memory of a node that caches samples"),
    "--disk-cache": ("disk_cache_bytes", "SIZE", bytes_of, "disk of a node that caches samples"),
    "--store-bandwidth": ("store_bandwidth", "SIZE", _bytes_s, "bytes a second, whole job"),
    "--store-latency": ("store_latency_s", "TIME", _seconds, "to the first byte, such as 20ms"),
    "--link-bandwidth": ("link_bandwidth", "SIZE", _bytes_s, "bytes a second between nodes"),
    "--samples": ("num_samples", "N", _count, "samples of the data set"),
    "--compute": ("compute_factor", "X", float, "a step computes X times as long"),
    "--decode": ("decode_factor", "X", float, "decoding takes X times as long"),
}


_SUCH_AS = {"N": "8", "X": "0.5", "SIZE": "100GB", "TIME": "20ms"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Predict the time, stall, traffic and memory of other runs of a traced job, with\n"
        "90 % bands. A second run, with other settings, makes the model surer."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("run", metavar="RUN", help="the folder of a trace")
    parser.add_argument("second", metavar="[RUN2]", nargs="?", help="a second run of the same job")
    for option, (name, metavar, _, text) in _OPTIONS.items():
        parser.add_argument(option, dest=name, metavar=metavar, default="", help=text)
    parser.add_argument(
        "--needs", action="store_true", help="what each resource would have to be for no stall"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate, predict, print."""
    second = read_trace(args.second) if args.second else None
    model = calibrate(read_trace(args.run), second)
    asked = [(question, model.predict(question)) for question in _questions(args)]
    found = needs(model, asked[0][0]) if args.needs else ()
    if args.json:
        print_json(_plain(model, asked, found))
        return 0
    screen = Screen()
    _show_model(screen, model)
    _show_forecasts(screen, asked)
    if len(words := _words(args.nodes)) > 1 and len(asked) == len(words):
        _show_takeovers(screen, model, asked)
    if found:
        _show_needs(screen, found)
    _show_notes(screen, asked)
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _questions(args: argparse.Namespace) -> Iterator[WhatIf]:
    """Yield all combinations of the values that were given."""
    values: list[list[tuple[str, Any]]] = []
    for option, (name, metavar, parsed, _) in _OPTIONS.items():
        words = _words(getattr(args, name))
        try:
            if words:
                values.append([(name, parsed(word)) for word in words])
        except ValueError:
            raise OptionError(
                f"{option} {getattr(args, name)!r} makes no sense; write {_SUCH_AS[metavar]}, or "
                "several values with commas between them"
            ) from None
    for chosen in itertools.product(*values):
        yield WhatIf(**dict(chosen))


def _plain(
    model: RunModel, asked: list[tuple[WhatIf, Forecast]], found: tuple[ResourceNeed, ...]
) -> dict[str, Any]:
    return {
        "loader": model.loader,
        "run": asdict(model.settings),
        "measured": asdict(model.measured),
        "self_check": model.self_check(),
        "notes": list(model.notes),
        "forecasts": [{"what_if": q.changes, **asdict(f)} for q, f in asked],
        "needs": [asdict(need) for need in found],
    }


def _show_model(screen: Screen, model: RunModel) -> None:
    settings, measured = model.settings, model.measured
    fits = "fits" if model.fits else "does not fit"
    screen.pairs(
        {
            "run": f"{model.loader}, ranks: {settings.num_ranks} on {settings.nodes} "
            f"{'node' if settings.nodes == 1 else 'nodes'}, batch size: {settings.batch_size}, "
            f"workers of a rank: {settings.workers}",
            "data": f"{settings.num_samples:,} samples"
            + (f", {show_bytes(settings.dataset_bytes)}" if settings.dataset_bytes else ""),
            "measured": f"{show_seconds(measured.step_s)} a step in the last epoch, "
            f"{measured.stall_share:.0%} of it waiting",
            "model": f"{fits}: its replay of the run is {model.self_check():+.1%} off",
        }
    )


def _show_forecasts(screen: Screen, asked: list[tuple[WhatIf, Forecast]]) -> None:
    screen.heading("Forecast (90 %: the band of the step)")
    several = [question.changes for question, _ in asked[1:]]
    common = {
        name: value
        for name, value in asked[0][0].changes.items()
        if several and all(other.get(name) == value for other in several)
    }
    if common:
        screen.line(f"  all: {_shown(common)}")
    header = ("change", "step", "90 %", "smp/s", "epoch", "stall", "store", "peers", "limit")
    changes = [
        _shown({k: v for k, v in question.changes.items() if k not in common}) or "as it was"
        for question, _ in asked
    ]
    forecasts = [forecast for _, forecast in asked]
    rows = [(change, *_row(f)) for change, f in zip(changes, forecasts, strict=True)]
    screen.table(header, rows, right=range(1, 8))
    screen.heading("First epoch, and the other bands (90 %)")
    titles = ("change", "first", "90 %", "stall", "store", "peers")
    bands = [(change, *_bands(f)) for change, f in zip(changes, forecasts, strict=True)]
    screen.table(titles, bands, right=range(1, 6))


def _shown(changes: dict[str, Any]) -> str:
    words = {name: option.removeprefix("--") for option, (name, *_) in _OPTIONS.items()}
    return " ".join(f"{words[k]}={_value(k, v)}" for k, v in changes.items())


def _row(f: Forecast) -> tuple[str, ...]:
    return (
        show_seconds(f.step_s),
        _apart(f.step_s_low, f.step_s, f.step_s_high),
        f"{f.samples_s:,.0f}",
        show_seconds(f.epoch_s[-1]),
        f"{f.stall_share:.0%}",
        show_bytes(f.store_bytes),
        show_bytes(f.peer_bytes),
        f.limit,
    )


def _bands(f: Forecast) -> tuple[str, ...]:
    return (
        show_seconds(f.epoch_s[0]),
        _apart(f.first_epoch_s_low, f.epoch_s[0], f.first_epoch_s_high),
        f"{100 * f.stall_share_low:.0f}–{f.stall_share_high:.0%}",
        _apart(f.store_bytes_low, f.store_bytes, f.store_bytes_high),
        _apart(f.peer_bytes_low, f.peer_bytes, f.peer_bytes_high),
    )


def _apart(low: float, middle: float, high: float) -> str:
    """Return how far the ends of a band are from its middle."""
    if not middle:
        return "–"
    digits = 0 if high / middle > 1.01 else 1
    return f"-{100 * (1 - low / middle):.{digits}f} +{high / middle - 1:.{digits}%}"


def _value(name: str, value: float) -> str:
    if name.endswith(("_bytes", "bandwidth")):
        return show_bytes(value).replace(" ", "")
    return show_seconds(value).replace(" ", "") if name.endswith("_s") else f"{value:g}"


def _show_takeovers(screen: Screen, model: RunModel, asked: list[tuple[WhatIf, Forecast]]) -> None:
    by_nodes = {question.nodes or 1: forecast for question, forecast in asked}
    for takeover in takeovers(model, by_nodes, asked[0][0]):
        screen.line(
            f"  from about {takeover.nodes} nodes on, the limit is {takeover.after}, not "
            f"{takeover.before}"
        )


def _show_needs(screen: Screen, found: tuple[ResourceNeed, ...]) -> None:
    screen.heading("Needed, each alone")
    rows = [
        (
            need.resource.replace("_", " "),
            _amount(need.resource, need.has),
            _amount(need.resource, need.no_stall),
            _amount(need.resource, need.little_stall),
        )
        for need in found
    ]
    screen.table(("resource", "has", "no stall", "at most 5 %"), rows, right=(1, 2, 3))


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return show_bytes(value) if name.endswith(("_bytes", "bandwidth")) else f"{value:g}"


def _show_notes(screen: Screen, asked: list[tuple[WhatIf, Forecast]]) -> None:
    notes = dict.fromkeys(note for _, forecast in asked for note in forecast.notes)
    if notes:
        screen.line()
    for note in notes:
        for line in textwrap.wrap(f"note: {note}", screen.width - 2):
            screen.line(f"  {line}")
