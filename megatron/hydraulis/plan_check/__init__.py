"""A second opinion on plans, by code that shares nothing with the planner.

Files, strategy notation, pipeline and bounds are read and computed here anew, from
``docs/planning.md``: an error of the planner's code is not repeated, and so comes to light.
"""
