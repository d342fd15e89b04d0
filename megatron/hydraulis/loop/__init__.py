"""Hanging into `megatron.training.pretrain()`: model container, train step, data, evaluation.

Everything here is thin: the engine, the planner and the data know nothing of the loop.
"""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
