"""Parses the command line into a verb and its arguments.

The top-level help needs only the table of verbs. The module of a verb has two functions:
`configure` adds its arguments to a parser, `run` carries it out and returns the exit code.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

EXIT_USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One thing the command can do."""

    name: str
    group: str
    """The heading it stands under."""
    line: str
    """What it does, in one line."""
    module: str
    """Where `configure` and `run` are."""


VERBS = {
    name: Verb(name=name, group=group, line=line, module=f"penstock.cli.{module}")
    for name, group, line, module in (
        ("info", "Look at data where it lies",
         "what a data set holds: counts, sizes, fields, a few samples", "info"),
        ("order", "Look at data where it lies",
         "which sample comes when, and how well it is shuffled", "order"),
        ("index", "Prepare data",
         "find every sample once, so that opening takes no time", "index"),
        ("pack", "Prepare data",
         "copy a data set into shards that any tool can read", "pack"),
        ("verify", "Prepare data",
         "read every sample and compare it with the index", "verify"),
        ("probe", "Look after a node",
         "measure memory, disks and the store, for plans to start from", "probe"),
        ("tiers", "Look after a node",
         "what runs keep in memory and on disk here, and giving it up", "tiers"),
        ("node", "Look after a node",
         "keep and serve what jobs of this host read, as a service", "node"),
        ("cluster", "Look after a node",
         "the nodes of a run: what they hold, what they read from where", "cluster"),
        ("trace", "Understand a run",
         "run a job with any loader and record what it reads and waits for", "trace"),
        ("analyze", "Understand a run",
         "what limits a run, why, and what to change", "analyze"),
        ("report", "Understand a run",
         "the same as one page with charts", "report"),
        ("compare", "Understand a run",
         "two traced runs side by side", "compare"),
        ("top", "Understand a run",
         "the ranks of a run, live: samples a second, stalls, sources", "top"),
        ("export", "Understand a run",
         "the trace of a run for Perfetto, Arrow and Parquet", "export"),
        ("plan", "Look ahead",
         "what a run will read from where, and what will limit it", "plan"),
        ("simulate", "Look ahead",
         "compare caching policies on machines that are only described", "simulate"),
        ("predict", "Look ahead",
         "what other scales, caches and stores would make of a traced run", "predict"),
        ("completion", "Set up",
         "let bash, zsh or fish complete verbs and options", "completion"),
    )
}  # fmt: skip

_OPENING = """\
Penstock moves every byte a training step waits for, early enough that nothing
waits. It reads data where it lies: folders, S3, GCS, Azure, HTTP.

Usage: penstock VERB [arguments]        (penstock help VERB tells more)
"""

_CLOSING = """\
Examples
  penstock info s3://bucket/train/ --anonymous
  penstock pack ~/pictures s3://bucket/pictures/

Options
  -h, --help   show this page
  --version    show the version
  --debug      show the traceback of an error
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line like all others of the command."""

    def error(self, message: str) -> NoReturn:
        """Print the error and the way to the help, and exit with 2."""
        self.exit(EXIT_USAGE, f"penstock: error: {message}; see {self.prog} --help\n")


def parse(words: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """Return the verb and its arguments; help, version and usage errors leave at once."""
    # Words after -- belong to another program (`penstock trace -- COMMAND`).
    end = words.index("--") if "--" in words else len(words)
    rest = [word for word in words[:end] if word != "--debug"] + list(words[end:])
    first = rest[0] if rest else "--help"
    if first in ("-h", "--help", "help"):
        _show_help(rest[1] if len(rest) > 1 else None)
        sys.exit(0 if rest else EXIT_USAGE)
    if first == "--version":
        from penstock import __version__

        sys.stdout.write(f"penstock {__version__}\n")
        sys.exit(0)
    if first not in VERBS:
        _refuse(first)
    verb = VERBS[first]
    return verb, parser_of(verb).parse_args(rest[1:])


def _show_help(word: str | None) -> None:
    """Print the help of a verb, or of all; a word that is no verb leaves at once."""
    if word is None or word.startswith("-"):
        sys.stdout.write(help_page())
    elif word in VERBS:
        parser_of(VERBS[word]).print_help()
    else:
        _refuse(word)


def parser_of(verb: Verb) -> Parser:
    """Return the parser of one verb, with its help and example."""
    parser = Parser(
        prog=f"penstock {verb.name}", formatter_class=_Help, allow_abbrev=False, add_help=False
    )
    importlib.import_module(verb.module).configure(parser)
    named = [action.metavar for action in parser._actions if not action.option_strings]
    parser.usage = " ".join([parser.prog, *map(str, named), "[options]"])
    parser._positionals.title, parser._optionals.title = "Arguments", "Options"
    group = parser.add_argument_group("Other")
    group.add_argument("-h", "--help", action="help", help="show this page")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that fits 80 columns and keeps the lines of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=79)


def help_page() -> str:
    """Return what `penstock --help` shows: verbs by group, then examples."""
    lines = [_OPENING]
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        lines.append(group)
        lines += [f"  {v.name:<10} {v.line}" for v in VERBS.values() if v.group == group]
        lines.append("")
    return "\n".join([*lines, _CLOSING])


def _refuse(word: str) -> NoReturn:
    near = difflib.get_close_matches(word, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(VERBS)}."
    what = "option" if word.startswith("-") else "verb"
    sys.stderr.write(f"penstock: error: there is no {what} {word!r}; {hint} See penstock --help\n")
    sys.exit(EXIT_USAGE)
