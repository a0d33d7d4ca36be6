"""Step programs, carried out: load, compute and communicate as one program on torch."""
