"""A run while it goes on: its ranks now and in the last seconds.

Two sources, one value (`engine.snapshot.LiveRank`): `following` reads the trace of a run, of any
loader; `scraping` asks the metrics endpoints of Penstock's engines. `screen` makes the page of
`penstock top` out of it. `otel` and `tensorboard` hand the figures of a loader to other tools.
"""
