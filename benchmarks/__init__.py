"""Benchmarks of the project; README.md describes them."""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
