"""A pool in which schemes that list no layers get the layers that somebody chooses for them."""

from collections.abc import Callable
from dataclasses import replace

from megatron.hydraulis.scheme import Replica, Scheme
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["balance_pool"]

ChooseLayers = Callable[[Scheme, int | None], Scheme]
"""From a scheme without layers, and the most tokens of a micro-batch that its strategy sets for it,
to the scheme with layers, or the same scheme where the even split will do."""


def balance_pool(pool: Pool, choose: ChooseLayers) -> Pool:
    """The pool with the layers of every pipeline that lists none.

    Strategies keep their names, but for those that are called by their own text.
    """
    return Pool.of(*(_balance(strategy, choose) for strategy in pool.strategies))


def _balance(strategy: Strategy, choose: ChooseLayers) -> Strategy:
    chosen = {
        scheme: choose(scheme, strategy.token_limit(scheme))
        if scheme.layers is None and scheme.pp > 1
        else scheme
        for scheme in strategy.schemes
    }
    limits: dict[Scheme, int] = {}
    for scheme, limit in strategy.token_limits:
        # A scheme may turn into another one of the strategy: the lower limit holds for both.
        limits[chosen[scheme]] = min(limit, limits.get(chosen[scheme], limit))
    balanced = replace(
        strategy,
        replicas=tuple(
            Replica(chosen[replica.scheme], replica.ranks) for replica in strategy.replicas
        ),
        token_limits=tuple(limits.items()),
    )
    return replace(balanced, name=str(balanced)) if strategy.name == str(strategy) else balanced
