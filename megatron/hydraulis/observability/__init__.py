"""A run's records, and everything that is written and drawn from them.

Nothing here knows how training works; the training loop fills an `IterationRecord`.
"""
