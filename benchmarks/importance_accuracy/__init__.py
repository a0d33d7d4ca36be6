"""Time to accuracy: what do importance sampling and its cache bring to a training run?

    python -m benchmarks.importance_accuracy cifar10 FOLDER --device cuda --jobs 8
    python -m benchmarks.importance_accuracy fashion FOLDER --device cpu --jobs 2
    python -m benchmarks.importance_accuracy --quick

Every system (`benchmarks.samplers`) trains the same net from the same weights with the
same optimizer, batch size and number of gradient steps. Training is real. Reading is modelled
(`wall_time`): the data is in memory, and the run records how many samples of each step were cache
misses. So one run gives the wall time under any store: `--again REPORT.json` prints the tables of
finished runs with other stores.

* `data` reads the images, `models` has the nets, `training` the loop.
* `wall_time` turns misses into seconds, `summary` turns runs into tables.
"""
