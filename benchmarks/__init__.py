"""Measurements that are too long for tests. `python -m benchmarks.convergence --help`."""
