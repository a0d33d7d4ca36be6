"""Kernels: each region of a program as one function of tensors.

`body` takes a region out of its program; it is carried out eagerly, tile by tile, as C, through
`torch.compile` or by Triton, and `regions` chooses one of these.
"""
