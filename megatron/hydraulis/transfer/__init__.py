"""Transfer plans: which rank owns which part of the model, and who sends what to whom.

Pure data over ranges; neither torch nor megatron is imported here.
"""
