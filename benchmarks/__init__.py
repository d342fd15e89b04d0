"""Benchmarks of the project; README.md describes them."""

import logging
import warnings

# When imported, upstream warns in many modules that Transformer Engine and Apex are missing, and
# torch warns that there is no CUDA runtime.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
