"""What a run shows: a record per iteration, and everything that is written and drawn from it.

Nothing here knows how training works; the training loop fills an `IterationRecord`.
"""
