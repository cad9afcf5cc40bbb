"""Benchmarks of mmattn against its peers, on named real workloads. `python -m bench.run --help`."""
