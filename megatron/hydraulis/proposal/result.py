"""What a proposal says, as plain data."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron.hydraulis.strategy import Pool

__all__ = ["PoolMember", "PoolSize", "Proposal", "RegimeChoice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMember:
    """A strategy of the proposed pool. Times are means of predicted iteration times."""

    name: str
    replicas: str
    longest_tokens: int
    """Longest sequence that it holds."""
    num_batches: int
    """Batches for which it is the pool's fastest."""
    mean_s: float | None
    """Over these batches; None without any."""
    gain_s: float | None
    """By how much the mean over all batches would rise without it; None when the rest of the pool
    could not run every batch or hold the corpus' longest sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """The first strategies of the pool, in an order in which each one helps those before most."""

    names: tuple[str, ...]
    mean_s: float
    """With these alone, over all batches; by bounds where no plan was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeChoice:
    """Batches by their longest sequence, and the one strategy that is best for them."""

    above_tokens: int
    up_to_tokens: int
    num_batches: int
    replicas: str
    name: str | None
    """In the pool; None when the pool does without it."""
    mean_s: float
    """With this strategy alone; by bounds where no plan was made."""
    pool_mean_s: float
    """With the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A pool with what it is worth."""

    pool: Pool
    members: tuple[PoolMember, ...]
    """In the order of the pool: the most used first."""
    mean_s: float
    """Mean predicted iteration time over all batches, by full plans."""
    sizes: tuple[PoolSize, ...]
    one_more_s: float | None
    """Mean with one strategy more; None when nothing was found to add."""
    one_more: tuple[str, ...] | None
    """What that larger pool has beside members of this one."""
    regimes: tuple[RegimeChoice, ...]
    num_batches: int
    num_mixes: int
    """Strategies that were looked at closely."""
    num_bounds: int
    num_plans: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it; the pool as in its file."""
        content = {
            name: getattr(self, name)
            for name in (
                "mean_s",
                "one_more_s",
                "one_more",
                "num_batches",
                "num_mixes",
                "num_bounds",
                "num_plans",
                "seconds",
            )
        }
        return {
            "pool": self.pool.to_json(),
            "members": [asdict(member) for member in self.members],
            "sizes": [asdict(size) for size in self.sizes],
            "regimes": [asdict(regime) for regime in self.regimes],
            **content,
        }
