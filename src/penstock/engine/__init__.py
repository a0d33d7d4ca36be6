"""What makes batches: plans, fetches, fills and reads tiers, serves peers, decodes and transforms.

It decides nothing that `order`, `plan` and `flow` can decide, and it knows nothing of the training
loop: finished batches leave it, and `loader` hands them over.
"""
