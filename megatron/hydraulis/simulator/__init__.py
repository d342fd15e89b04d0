"""Simulates iterations as events, without a device: plans and simpler ways to train."""
