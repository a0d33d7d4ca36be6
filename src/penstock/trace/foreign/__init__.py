"""Jobs with other loaders: what they read and wait for, recorded without changing them.

`launch` runs a command with an environment in which every Python process begins with hooks for
torch's DataLoader (`startup`, `imports`, `dataloader`), and in which a preloaded library
(`preload.c`) records what processes read through the C library. Nothing here imports torch: hooks
wait until the job does.

A hook must never break the job. Whatever fails in it is written to the run's folder once, and the
job goes on without that hook.
"""
