"""Regions of a program as one function of tensors each.

`body` takes a region out of its program; it is carried out eagerly, tile by tile, as C, through
`torch.compile` or by Triton, and `regions` chooses.
"""
