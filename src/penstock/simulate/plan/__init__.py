"""Plans: a run foreseen from a few numbers, without playing it.

Pure, but for `page`, which draws. A plan is made from an index, an order, a world and a machine.
`penstock.simulate.predict` plays the same run event by event and takes longer.

* `summary`, `work`, `traffic`, `planner` – bytes, times and limits of a run
* `what_if`, `explain` – what more of something would buy, and all of it in words
"""
