"""What torch's own world asks for beside `Loader`; public names are in `penstock.torch`.

With `penstock.step` this is the only room that imports torch. The engine looks up `tensors`,
`pinning`, `ranges` and `rendezvous` by name where torch is installed. Nothing here starts a process
group, and nothing reads or decodes.
"""
