"""`penstock demo`: the whole way of a sample in one minute, on this machine, with nothing else.

`verb` makes room for it and `story` tells it; `shapes` draws the images, `ranks` starts and kills
the processes that train, `trainer` is what runs in them, `view` and `stage` are what is seen
meanwhile. The model is `penstock.loader.torch.tiny`: torch is imported in the training processes
only.
"""
