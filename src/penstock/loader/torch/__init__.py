"""The pieces that PyTorch needs beside `Loader`; the public names are in `penstock.torch`.

Beside `penstock.step` this is the only room that imports torch. The engine imports `tensors`,
`pinning`, `ranges` and `rendezvous` by name if torch is installed. Nothing here starts a process
group, and nothing reads or decodes.
"""
