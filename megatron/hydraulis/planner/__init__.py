"""Iteration plans and the planners that make them."""
