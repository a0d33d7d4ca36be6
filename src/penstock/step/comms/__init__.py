"""Collectives between ranks: one interface, `comm`, and the transports that carry it out.

The transports are gloo's sockets (`gloo`), shared memory of a host (`shm`), NCCL (`nccl`), and
pointers into other GPUs' memory (`peer`).
"""
