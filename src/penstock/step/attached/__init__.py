"""An eager model and its optimizer, unmodified, with a schedule under its own training loop.

`attach` hooks into both; `record` watches the first step, `plan` decides once on all ranks,
`arenas` and `share` hold what this rank owns, and `flow` carries gradients and weights by units.
"""
