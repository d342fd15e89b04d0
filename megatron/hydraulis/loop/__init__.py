"""Training inside `megatron.training.pretrain()`: entry point, step, data, plans, checkpoints.

Engine, planner and data do not know the loop.
"""

from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

silence_warnings_of_imports()
