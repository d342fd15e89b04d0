"""A CUDA stand-in: the GPU's path, run on a machine without a GPU. See README.md."""
