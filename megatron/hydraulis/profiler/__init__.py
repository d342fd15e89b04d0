"""Measuring a cost profile, and fitting one anew while training runs."""
