"""`penstock demo`: the whole way of a sample in one minute, on this machine, with nothing else.

`verb` tells the story, `shapes` draws the images, `run` starts and kills the processes that train, `trainer` is
what runs in them, `view` is what is seen meanwhile. The model is `penstock.torch.tiny`: torch is
imported in the training processes only.
"""
