"""What ranks say to each other: one protocol, `comm`, and those who carry it.

gloo's sockets, shared memory of a host, NCCL, and pointers into other GPUs' memory.
"""
