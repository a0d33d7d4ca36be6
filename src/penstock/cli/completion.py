"""`penstock completion`: prints a script that completes verbs and options in bash, zsh or fish.

The script is made from the parsers of all verbs, so it has exactly their options. It is static, so
TAB starts no Python; a new version of Penstock needs a new script.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.cli.parser import VERBS, Verb, parser_of

SHELLS = ("bash", "zsh", "fish")

_EXAMPLE = """\
Examples
  eval "$(penstock completion bash)"           (in ~/.bashrc)
  eval "$(penstock completion zsh)"            (in ~/.zshrc, after compinit)
  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Print a script that lets your shell complete verbs and options when you press\n"
        "TAB, and file names elsewhere."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]
    sys.stdout.write(script())
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompletedOption:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    """The values that may follow; empty: any value."""


def _options(verb: Verb) -> Iterator[_CompletedOption]:
    for action in parser_of(verb)._actions:
        if action.option_strings:
            yield _CompletedOption(
                names=tuple(action.option_strings),
                help=(action.help or "").replace("%%", "%"),
                takes_value=action.nargs != 0,
                values=tuple(map(str, action.choices or ())),
            )


def _operands(verb: Verb) -> tuple[str, ...]:
    """Return the choices of a verb's operands; empty where they name files or data."""
    actions = parser_of(verb)._actions
    return tuple(str(c) for a in actions if not a.option_strings for c in a.choices or ())


# -- bash ----------------------------------------------------------------------------------------

_BASH = """\
# Completes penstock in bash. Made by: penstock completion bash
_penstock() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}}
    local words=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        words={verbs}
    else
        case "$verb $prev" in
{values}
            *)
                case "$verb $cur" in
{options}
                esac ;;
        esac
    fi
    [[ $words ]] && COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _penstock penstock
"""


def _bash() -> str:
    values, options = [], []
    for verb in VERBS.values():
        found = list(_options(verb))
        for option in found:
            if option.takes_value:
                # With no words to choose from, bash completes the name of a file.
                names = "|".join(f'"{verb.name} {name}"' for name in option.names)
                values.append(f"            {names}) words={_words(option.values)} ;;")
        names = _words(name for option in found for name in option.names)
        options.append(f'                "{verb.name} -"*) words={names} ;;')
        if operands := _operands(verb):
            options.append(f'                "{verb.name} "*) words={_words(operands)} ;;')
    options.append(f'                "help "*) words={_words(VERBS)} ;;')
    verbs = _words([*VERBS, "help"])
    return _BASH.format(verbs=verbs, values="\n".join(values), options="\n".join(options))


def _words(words: Iterable[str]) -> str:
    return f"'{' '.join(words)}'"


# -- zsh -----------------------------------------------------------------------------------------

_ZSH = """\
#compdef penstock
# Completes penstock in zsh. Made by: penstock completion zsh
_penstock() {{
    if (( CURRENT == 2 )); then
        local -a verbs=(
{verbs}
        )
        _describe verb verbs
        return
    fi
    local verb=$words[2]
    shift words
    (( CURRENT-- ))
    case $verb in
{cases}
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _penstock "$@"
else
    compdef _penstock penstock
fi
"""


def _zsh() -> str:
    verbs = "\n".join(f"            {_quoted(f'{v.name}:{v.line}')}" for v in VERBS.values())
    cases = []
    for verb in VERBS.values():
        operands = _operands(verb)
        rest = f"*:argument:({' '.join(operands)})" if operands else "*:file:_files"
        lines = [_quoted(text) for option in _options(verb) for text in _zsh_option(option)]
        joined = " \\\n            ".join([*lines, _quoted(rest)])
        cases.append(f"        {verb.name}) _arguments \\\n            {joined} ;;")
    cases.append(f"        help) compadd {' '.join(VERBS)} ;;")
    return _ZSH.format(verbs=verbs, cases="\n".join(cases))


def _zsh_option(option: _CompletedOption) -> Iterator[str]:
    about = re.sub(r"([\\\[\]:])", r"\\\1", option.help)
    after = ""
    if option.takes_value:
        after = f":value:({' '.join(option.values)})" if option.values else ":value:_files"
    for name in option.names:
        yield f"*{name}[{about}]{after}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# -- fish ----------------------------------------------------------------------------------------


def _fish() -> str:
    lines = ["# Completes penstock in fish. Made by: penstock completion fish"]
    for verb in VERBS.values():
        about = _fish_quoted(verb.line)
        lines.append(f"complete -c penstock -f -n __fish_use_subcommand -a {verb.name} -d {about}")
    for verb in VERBS.values():
        seen = f"complete -c penstock -n '__fish_seen_subcommand_from {verb.name}'"
        lines += [" ".join([seen, *_fish_words(option)]) for option in _options(verb)]
        if operands := _operands(verb):
            lines.append(f"{seen} -f -a {_fish_quoted(' '.join(operands))}")
    lines.append(
        "complete -c penstock -f -n '__fish_seen_subcommand_from help' -a "
        + _fish_quoted(" ".join(VERBS))
    )
    return "\n".join([*lines, ""])


def _fish_words(option: _CompletedOption) -> Sequence[str]:
    words = []
    for name in option.names:
        words += ["-l" if name.startswith("--") else "-s", name.lstrip("-")]
    if option.values:
        words += ["-x", "-a", _fish_quoted(" ".join(option.values))]
    elif option.takes_value:
        words.append("-r")
    return [*words, "-d", _fish_quoted(option.help)]


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
