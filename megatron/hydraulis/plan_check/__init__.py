"""A second opinion on plans, by code that shares nothing with the planner.

Files, strategy notation, pipeline and bounds have their own implementation here, written from
``docs/planning.md``, so that an error in the planner's code is not repeated but found.
"""
