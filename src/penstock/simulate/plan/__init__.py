"""Plans: estimates of a run from a few numbers, without simulating it.

Pure, except for `page`, which draws. A plan is made from an index, an order, a world and a machine.
`penstock.simulate.predict` simulates the same run event by event and takes longer.

* `summary`, `work`, `traffic`, `planner` – bytes, times and limits of a run
* `what_if`, `explain` – the gain of faster or larger resources, and the whole plan in words
"""
