"""Training jobs as people write them. They know nothing of tracing, and print their throughput."""
