"""Running a plan: process groups, role models, arenas, gather and scatter, Megatron's schedules.

Nothing here knows `megatron.training`; tests drive it without the training loop.
"""
