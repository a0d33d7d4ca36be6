"""What the tests and benchmarks of this repository share and users do not get."""
