"""Benchmarks on a machine with a GPU: ``python -m benchmarks.gpu``."""
