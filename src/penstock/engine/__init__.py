"""The engine makes batches: it plans, fetches, fills and reads tiers, decodes and transforms.

It decides nothing that `order` and `flow` can decide, and it knows nothing of the training loop:
`loader` hands the finished batches over. README.md tells the life of a batch. `peers` lets nodes
read from each other and knows nothing of the rest of the engine. `node` is `penstock node`: tiers
and the peer server as a service that jobs share.
"""
