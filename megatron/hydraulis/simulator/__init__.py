"""Iterations run as events, without a device: what plans and simpler ways of training would take.

Nothing here asks the planner how long its plans take.
"""
