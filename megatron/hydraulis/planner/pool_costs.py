"""A pool with what its strategies cost, and the batches that it can hold."""

import operator
from collections.abc import Sequence

from megatron.hydraulis.cost_model.interface import CostModel, given_limit
from megatron.hydraulis.cost_model.strategy_costs import StrategyCosts
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.wave_costs import GroupCost, WaveCosts
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["PoolCosts", "checked_batch"]


class PoolCosts:
    """Costs of every scheme in every strategy of a pool.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(self, pool: Pool, cost_model: CostModel) -> None:
        self.pool = pool
        costs = {strategy: StrategyCosts(cost_model, strategy) for strategy in pool.strategies}
        self.overheads_ms = {strategy.name: costs[strategy].overhead_ms for strategy in costs}
        """By the name of a strategy: what an iteration takes beside its makespan."""
        self._limits_of = {strategy.name: costs[strategy].max_tokens for strategy in costs}
        self._strategy_costs = {strategy.name: of for strategy, of in costs.items()}
        self._costs = {
            (strategy.name, scheme): _scheme_cost(scheme, costs[strategy])
            for strategy in pool.strategies
            for scheme in strategy.schemes
        }

    def max_tokens(self, strategy: Strategy, scheme: Scheme) -> int:
        """Most tokens of a micro-batch, or of a context group that costs like the scheme."""
        return self._strategy_costs[strategy.name].max_tokens(scheme)

    def replica_costs(self, strategy: Strategy) -> list[SchemeCost]:
        """Shape (num_replicas,), equal for replicas of one scheme."""
        return [self._costs[strategy.name, replica.scheme] for replica in strategy.replicas]

    def able_strategies(self, batch: Sequence[int], iteration: int) -> list[Strategy]:
        """The strategies that can hold the longest sequence, and their own weights everywhere.

        Raises PlanError when there is none.
        """
        longest = max(batch)
        able = []
        for strategy in self.pool.strategies:
            limits = self._limits(strategy)
            if min(limits) > 0 and max(limits) >= longest:
                able.append(strategy)
        if able:
            return able
        raise PlanError(self._unable_message(batch, iteration))

    def _limits(self, strategy: Strategy) -> list[int]:
        return [self._costs[strategy.name, scheme].max_tokens for scheme in strategy.schemes]

    def _unable_message(self, batch: Sequence[int], iteration: int) -> str:
        longest = max(batch)
        fitting = [
            (max(self._limits(strategy)), strategy)
            for strategy in self.pool.strategies
            if min(self._limits(strategy)) > 0
        ]
        if not fitting:
            first = self.pool.strategies[0]
            scheme = next(s for s in first.schemes if self._costs[first.name, s].longest == 0)
            return (
                f"plan of iteration {iteration + 1}: every replica needs room for its weights and "
                f"a token but in each of {len(self.pool.strategies)} strategies some scheme has "
                f"none, in {first.name!r} {scheme}; use larger degrees"
            )
        limit, strategy = max(fitting, key=operator.itemgetter(0))
        return (
            f"plan of iteration {iteration + 1}: a sequence must fit one micro-batch but sequence "
            f"{batch.index(longest)} has {longest} tokens and the largest limit, in strategy "
            f"{strategy.name!r}, is {limit}; split or drop long sequences, raise the limit of "
            f"tokens per micro-batch, or add a replica with a larger tp or cp"
        )


def _limit_of_rows(max_tokens: int, scheme: Scheme) -> int:
    """The limit as sequences see it: with cp > 1 rows come padded, so part of it may be no use."""
    return given_limit(max_tokens, scheme) if scheme.cp > 1 else max_tokens


def _scheme_cost(scheme: Scheme, costs: StrategyCosts) -> SchemeCost:
    if scheme.splits_cp:
        waves = _wave_costs(scheme, costs)
        return SchemeCost(
            coefficients=waves.mean_coefficients,
            max_tokens=waves.most_tokens,
            num_stages=scheme.pp,
            waves=waves,
        )
    limit = costs.max_tokens(scheme)
    return SchemeCost(
        coefficients=costs.coefficients(scheme),
        max_tokens=limit if scheme.cp == 1 else given_limit(limit, scheme),
        num_stages=scheme.pp,
        multiple=1 if scheme.cp == 1 else 2 * scheme.cp,
    )


def _wave_costs(scheme: Scheme, costs: StrategyCosts) -> WaveCosts:
    """Groups of sizes that the cost model does not know hold nothing."""
    full_width = costs.coefficients(scheme)
    groups = []
    size = 1
    while size <= scheme.cp:
        of_group = scheme.of_context_group(size)
        try:
            coefficients, limit = costs.coefficients(of_group), costs.max_tokens(of_group)
        except StrategyError:
            coefficients, limit = full_width, 0
        groups.append(GroupCost(size, coefficients, limit, tp=scheme.tp))
        size *= 2
    return WaveCosts(tuple(groups), num_stages=scheme.pp)


def checked_batch(lengths: Sequence[int], iteration: int) -> list[int]:
    """The lengths as Python ints (numpy's would not go into JSON); PlanError for no batch."""
    batch = [int(length) for length in lengths]
    if not batch:
        raise PlanError(
            f"plan of iteration {iteration + 1}: a batch holds at least 1 sequence but has 0; "
            f"plan only batches with sequences"
        )
    if min(batch) < 1:
        raise PlanError(
            f"plan of iteration {iteration + 1}: a sequence has at least 1 token but sequence "
            f"{batch.index(min(batch))} has {min(batch)}; drop empty sequences from the batch"
        )
    return batch
