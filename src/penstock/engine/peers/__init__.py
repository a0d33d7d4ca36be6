"""Nodes read from each other's tiers: wire format, membership, server and client.

A peer is one more source of bytes. A client requests ranges of units in the coordinates of the
peer's tier files; the peer sends what it has and reports how far it has filled the rest. Clients
check what a peer sends, and the object store remains the last resort. README.md follows one
request through the classes of this room.
"""
