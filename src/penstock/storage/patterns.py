"""Braces and globs: names that stand for many.

Braces (`{000..127}`, `{a,b}`) are expanded without a listing, so they work where nothing can be
listed. Globs are matched against a listing (`*` and `?` within a part, `**` across parts, `[0-9]`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from penstock.errors import OptionError

NAMES_MAX = 10_000_000
"""Names that braces may stand for; more must be a typing error."""
EVERYTHING = ("folder:",)
"""The names of a data set that is a whole folder, bucket or prefix."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(pattern: str) -> list[str]:
    """Return the names a pattern with braces stands for, in order.

    >>> expand_braces("{train,val}-{08..10}.tar")[:4]
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar']
    """
    pieces = _BRACES.split(pattern)
    literals, groups = pieces[0::2], pieces[1::2]
    if any("{" in literal or "}" in literal for literal in literals):
        raise OptionError(f"{pattern!r} has braces that do not pair, or braces within braces")
    choices = [_choices(group, pattern) for group in groups]
    num_names = 1
    for choice in choices:
        num_names *= len(choice)
    if num_names > NAMES_MAX:
        raise OptionError(
            f"{pattern!r} stands for {num_names} names, at most {NAMES_MAX} are taken"
        )
    return [_joined(literals, combination) for combination in itertools.product(*choices)]


def _choices(group: str, pattern: str) -> list[str]:
    counted = _COUNT.fullmatch(group)
    if counted is None:
        if "," not in group:
            raise OptionError(
                f"{{{group}}} in {pattern!r} is neither a range such as {{000..127}} nor a choice "
                "such as {a,b}"
            )
        return group.split(",")
    first, last = int(counted[1]), int(counted[2])
    if last < first or last - first >= NAMES_MAX:
        raise OptionError(f"{{{group}}} in {pattern!r} must count upwards, by at most {NAMES_MAX}")
    is_padded = any(len(digits) > 1 and digits[0] == "0" for digits in counted.groups())
    width = max(map(len, counted.groups())) if is_padded else 1
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def _joined(literals: list[str], combination: tuple[str, ...]) -> str:
    pairs = itertools.zip_longest(literals, combination, fillvalue="")
    return "".join(part for pair in pairs for part in pair)


def has_glob(name: str) -> bool:
    """Return whether a name holds a wildcard.

    >>> has_glob("train/*.tar"), has_glob("train/a.tar")
    (True, False)
    """
    return any(sign in name for sign in "*?[")


def fixed_folder(pattern: str) -> str:
    """Return the folder part before the first wildcard, ending with `/` or empty.

    >>> fixed_folder("data/train-*/x.tar")
    'data/'
    """
    parts = itertools.takewhile(lambda part: not has_glob(part), pattern.split("/")[:-1])
    return "".join(f"{part}/" for part in parts)


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return what a key must look like to match a glob.

    >>> bool(glob_regex("a/**/*.tar").fullmatch("a/b/c/d.tar")), bool(glob_regex("*").match("a/b"))
    (True, True)
    >>> bool(glob_regex("*").fullmatch("a/b"))
    False
    """
    return re.compile("".join(_regex_parts(pattern)), re.S)


_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", re.S)


def _regex_parts(pattern: str) -> Iterator[str]:
    for token in _TOKEN.findall(pattern):
        match token:
            case "**/":
                yield "(?:[^/]+/)*"
            case "**":
                yield ".*"
            case "*":
                yield "[^/]*"
            case "?":
                yield "[^/]"
            case _ if len(token) > 1:
                inside = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
                yield f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
            case _:
                yield re.escape(token)
