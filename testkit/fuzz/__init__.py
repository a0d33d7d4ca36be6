"""A fuzzer for everything that Penstock reads from outside.

    python -m testkit.fuzz --count 10000              every subject
    python -m testkit.fuzz --subject tar --seed 8     one of them, other inputs
    python -m testkit.fuzz --subject tar --only 417   one input again, in this process

A *subject* is one kind of input (`subjects`): a format, the files of an index, the files of a tier,
a saved state, a schedule, what peers say. It makes a good input once and then damages it, guided by
a seed (`mutate`). A worker process tries one damaged input after the other (`worker`); the campaign
watches from outside, so that a death or a hang is a finding like any other (`campaign`).

An input must either be read or be refused by an error of `penstock.errors`. Subjects that Penstock
has checksums for promise more: what is read is what was written. A tier promises most: nothing that
happens to its files may be seen at all. Findings are any other exception, the death of the process,
more than `HANG_S_MAX` seconds, more than `MEMORY_BYTES_MAX` of memory, and wrong data.

The subjects `verify-…` index, verify and pack a damaged set: none of it may die, and what `verify`
approves must be readable. How many parser processes the inputs ended is counted beside that.
"""
