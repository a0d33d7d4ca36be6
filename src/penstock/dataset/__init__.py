"""What bytes mean: samples, their fields, and where they lie.

`open` finds a data set and its index, `dataset.Dataset` reads samples, `formats/` knows how each
format lays them out, `part` and `catalog` are the index and its versions. `writer`, `pack` and
`verify` make and check data sets. Nothing here knows an order or starts a training loop.
"""
