"""Measures a cost profile, and fits it again while training runs."""
