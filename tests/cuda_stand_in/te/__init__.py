"""Transformer Engine on the CUDA stand-in; see ../README.md."""
