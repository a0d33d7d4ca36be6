"""Layout: where every sample lies on the nodes of a job, computed from an index and a world.

Pure, like the rest of `flow`: no clock, no thread, no I/O. Every rank computes the same layout, so
no rank has to ask another where something lies.

* `units`, `cuts` – what a tier keeps as one piece, and the rule that cuts it
* `placement` – where a unit lies in the tiers of a node
* `spans`, `draws`, `homes` – which nodes keep it, when there are several
* `assignment` – who computes which sample of a global batch
* `rereads` – how often an order reads a block again
"""
