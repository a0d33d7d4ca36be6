"""The node service: a long-lived process that owns the tiers and the peer server of one node.

All jobs on the node share it, and tiers outlive the job that filled them. The service grants each
data set a share of the node's memory and disks (`grants`), keeps the files after a job has ended
(`kept`, `sets`), and serves them to the other nodes of registered runs (`runs`). It never reads the
store: ranks fill the tiers with their own credentials, and peers get bytes straight from the files.
Start with `service`.
"""
