"""What makes batches: plans, fetches, fills and reads tiers, serves peers, decodes and transforms.

It decides nothing that `order` and `flow` can decide, and it knows nothing of the training loop:
finished batches leave it, and `loader` hands them over. `peers` are nodes that read from each
other; they know nothing of the rest of the engine. `node` is `penstock node`: tiers and the peer
server as a service that jobs share.
"""
