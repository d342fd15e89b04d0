"""Schemes, replicas, strategies and pools: what the parallelism of a job may be."""

from megatron.hydraulis.strategy.pool import Pool
from megatron.hydraulis.strategy.scheme import Position, Replica, Scheme
from megatron.hydraulis.strategy.strategy import Strategy

__all__ = ["Pool", "Position", "Replica", "Scheme", "Strategy"]
