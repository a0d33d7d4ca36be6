"""Plans: what moves where, and by when.

Pure: a plan is made from an index, an order, a world and a machine, and from nothing else: no
clock, no thread, no I/O. Carrying it out is `flow` and `loader`; pretending to is `simulate`.
Start with `units`, what a tier keeps, and `planner`, what a run will read from where.
"""
