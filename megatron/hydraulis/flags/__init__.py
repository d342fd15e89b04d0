"""Megatron's flags and ours: parsed, checked, filled with defaults, described."""
