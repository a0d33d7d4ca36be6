"""Nodes reading from each other: wire, members, server, client.

A peer is one more place that bytes can come from. It is asked for ranges of units in the
coordinates of its tier files, answers what it has, and says when it will have the rest. Nobody
trusts it further than that: what it sends is checked, and the store is always the last resort.
"""
