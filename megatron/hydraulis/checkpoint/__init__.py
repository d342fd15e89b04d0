"""Checkpoints: canonical shards as Megatron's `torch_dist` format, complete or not there at all."""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
