"""A node's service: tiers and the peer server as one long-lived process that jobs share.

Jobs come and go; what they read stays. The service grants each data set a part of the node's memory
and disks (`grants`), keeps the files alive when a job is over (`kept`, `sets`), and serves them to
the other nodes of the runs that registered (`runs`). It never reads a sample for itself: ranks
fill the tiers with credentials of their own, and peers are sent bytes straight from the files.
Start with `service`.
"""
