"""Where `load` gets its batches: in stages, a thread for each, over a wire shared with others."""
