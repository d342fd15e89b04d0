"""Predicts what a job gains from a pool, without running it."""
