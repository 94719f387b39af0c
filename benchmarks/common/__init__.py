"""Shared by the benchmarks: command lines, processes, provenance, result files, models and plots."""
