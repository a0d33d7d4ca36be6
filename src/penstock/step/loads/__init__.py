"""Loads: where `load` gets its batches, stage by stage, over a wire that they share."""
