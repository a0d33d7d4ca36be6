"""Does `penstock trace` name what keeps a GPU waiting? See `__main__`."""
