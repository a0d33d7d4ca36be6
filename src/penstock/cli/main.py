"""`main`: finds the verb and runs it; an error is one line and an exit code.

Only the module of that verb is imported, and `rich` only for a terminal, so that `penstock --help`
answers at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from penstock.cli.parser import parse
from penstock.errors import PenstockError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 (failed), 2 (usage) or 130 (Ctrl-C)."""
    _be_printable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words[: words.index("--") if "--" in words else None]
    _listen_to_warnings(logging.INFO if debug else logging.WARNING)
    try:
        verb, args = parse(words)
        return int(importlib.import_module(verb.module).run(args))
    except KeyboardInterrupt as interrupt:
        if arguments is None:
            # A second Ctrl-C, while threads end, ends the process at once and without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(": ".join(["penstock: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) is gone. The interpreter flushes stdout when it exits,
        # and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (PenstockError, OSError) as error:
        if debug:
            raise
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _be_printable() -> None:
    """Print `?` instead of a character that the terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _listen_to_warnings(level: int) -> None:
    # Replaced and not added: tests call `main` many times in one process.
    handler = logging.StreamHandler()
    handler.setFormatter(_LowerCase("penstock: %(levelname)s: %(message)s"))
    logger = logging.getLogger("penstock")
    logger.handlers = [handler]
    logger.setLevel(level)


class _LowerCase(logging.Formatter):
    """Levels as words in a sentence: `penstock: warning: …`."""

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)


if __name__ == "__main__":
    sys.exit(main())
