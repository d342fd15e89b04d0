"""Hydraulis: balanced training over sequences of very different lengths, on Megatron."""
