"""Checkpoints: canonical shards as Megatron's `torch_dist` format, complete or not there at all."""
