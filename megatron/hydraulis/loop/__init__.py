"""Hanging into `megatron.training.pretrain()`: model container, train step, data, evaluation.

Everything here is thin: the engine, the planner and the data know nothing of the loop.
"""

import logging
import warnings

# Upstream and torch warn while they are imported that Apex, Transformer Engine or a CUDA runtime
# are absent: known, and said a dozen times by every rank. Filters have to stand before the imports.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
