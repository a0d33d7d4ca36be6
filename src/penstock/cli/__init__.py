"""The command `penstock`: parse, call, print.

Verbs are dull: each file turns words into arguments, calls one function of another room and prints
what it returned. `main` finds the verb and turns errors into one line, `screen` decides what a
terminal may show, `progress` draws bars. What a person reads goes to stdout; how far things are
goes to stderr, so that `--json` can be piped. Start with `main.main`.
"""
