"""The fastest schedule of a program on the ranks that run it: calibrate, search, race, watch."""
