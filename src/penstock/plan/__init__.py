"""Plans: what moves where, and by when.

Pure: a plan is made from an index, an order, a world and a machine, and from nothing else: no
clock, no thread, no I/O. Carrying it out is `flow` and `loader`; pretending to is `simulate`.

* `units`, `cuts` – what a tier keeps as one, and the rule that cuts it
* `placement` – where a unit lies in the tiers
* `spans`, `draws`, `homes` – which nodes keep it, when there are several
* `assignment` – who computes which sample of a global batch
* `bound`, `cost` – the fewest bytes that must be read, and what a read costs
* `summary`, `work`, `traffic`, `planner` – a run foreseen from a few numbers: bytes, times, limits
* `what_if`, `explain` – what more of something would buy, and all of it in words
"""
