"""The whole way of a sample in one minute, on this machine, with nothing else.

    make demo                                 # or, from the checkout: python -m examples.demo
    python -m examples.demo --keep FOLDER     # leave images, shards and checkpoint there

It draws images, packs them into shards, trains a small network, kills it half-way with `kill -9`,
resumes on two ranks, and compares what was delivered with what the seed promised. `trainer` is the
part to copy from: a training process as a user would write it. `story` tells the scenes; `shapes`
draws the images, `ranks` starts and kills the training processes, `tiny_net` is their model;
`view` and `stage` show the progress.
"""
