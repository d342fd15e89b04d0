"""From flags to the pool of strategies that a run may use: checks that need no other rank."""

import argparse
import math
from collections.abc import Sequence

from megatron.hydraulis.config import HydraulisConfig
from megatron.hydraulis.elastic_pool import FittedPool, fit_pool, num_ranks_of
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["check_schedule", "check_vocabulary_parts", "resolve_pool"]


def resolve_pool(
    args: argparse.Namespace,
    hydraulis: HydraulisConfig,
    *,
    num_ranks: int,
    ranks_per_node: int | None,
    degrees_given: bool,
) -> FittedPool:
    """The strategies that the flags describe, placed on the job's ranks.

    With --elastic those for another number of ranks are fitted to it.

    ranks_per_node: None where neither flags nor launcher tell it: then the pool file does, and a
    single strategy takes the job for one node.

    Raises ConfigurationError when strategies are described twice and when the pool is for another
    job; StrategyError when one cannot be read or placed.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    source = None
    if hydraulis.strategy is not None:
        source = f"--strategy {hydraulis.strategy!r}"
    elif hydraulis.strategy_pool is not None:
        source = f"--strategy-pool {hydraulis.strategy_pool}"
    if source is None:
        num_used = num_ranks // (tp * pp) * tp * pp if hydraulis.elastic else num_ranks
        strategy = Strategy.homogeneous(
            num_used or num_ranks,
            tp=tp,
            pp=pp,
            ranks_per_node=ranks_per_node if num_used == num_ranks else None,
        )
        return _fitted(Pool.of(strategy), args, num_ranks, ranks_per_node)
    if degrees_given:
        raise ConfigurationError(
            f"{source} and --tensor-model-parallel-size {tp}, --pipeline-model-parallel-size {pp} "
            f"both lay out the replicas; give {source.split()[0]} or the sizes"
        )
    if hydraulis.strategy is not None:
        if hydraulis.elastic and num_ranks_of(hydraulis.strategy) != num_ranks:
            strategy = Strategy.parse(hydraulis.strategy, num_ranks_of(hydraulis.strategy))
        else:
            strategy = Strategy.parse(hydraulis.strategy, num_ranks, ranks_per_node=ranks_per_node)
        return _fitted(Pool.of(strategy), args, num_ranks, ranks_per_node)
    pool = Pool.read(str(hydraulis.strategy_pool))
    fitted = FittedPool(pool, ())
    if hydraulis.elastic:
        fitted = _fitted(pool, args, num_ranks, ranks_per_node or pool.ranks_per_node)
    pool = fitted.pool
    _check_job(pool, hydraulis, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    check_schedule(hydraulis, pool)
    if hydraulis.regroup_owners_for is not None:
        _check_name("--regroup-owners-for names a strategy", hydraulis.regroup_owners_for, pool)
    _check_limits_given_once(pool, hydraulis)
    return fitted


def _fitted(
    pool: Pool, args: argparse.Namespace, num_ranks: int, ranks_per_node: int | None
) -> FittedPool:
    ranks_per_node = ranks_per_node or num_ranks
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node:
        ranks_per_node = num_ranks  # nodes of different sizes: no placement is better than another
    return fit_pool(pool, num_ranks, ranks_per_node, num_layers=args.num_layers)


def _check_job(
    pool: Pool, hydraulis: HydraulisConfig, *, num_ranks: int, ranks_per_node: int | None
) -> None:
    what = f"--strategy-pool {hydraulis.strategy_pool}"
    if pool.num_ranks != num_ranks:
        start = f"--num-ranks {pool.num_ranks}" if hydraulis.dry_run else f"{pool.num_ranks} ranks"
        raise ConfigurationError(
            f"{what}: a pool is for the ranks of its job but this one is for {pool.num_ranks} "
            f"ranks and the job has {num_ranks}; {'give' if hydraulis.dry_run else 'start'} "
            f"{start}, write a pool for {num_ranks}, or let it be fitted by --elastic"
        )
    if ranks_per_node is not None and pool.ranks_per_node != min(ranks_per_node, num_ranks):
        raise ConfigurationError(
            f"{what}: a pool is for the nodes of its job but this one has {pool.ranks_per_node} "
            f"ranks a node and the job {ranks_per_node}; correct ranks_per_node in the file or "
            f"give --ranks-per-node {pool.ranks_per_node}"
        )


def check_schedule(hydraulis: HydraulisConfig, pool: Pool, left_out: Sequence[str] = ()) -> None:
    """Raise ConfigurationError when --strategy-schedule names a strategy that is not in the pool.

    left_out: the lines about strategies of the file that the run goes without.
    """
    for name in hydraulis.scheduled_strategies:
        _check_name("--strategy-schedule names strategies", name, pool, left_out)


def _check_name(what: str, name: str, pool: Pool, left_out: Sequence[str] = ()) -> None:
    """Raise ConfigurationError for a flag's name that no strategy of the pool has."""
    names = [strategy.name for strategy in pool.strategies]
    if name not in names:
        why = "".join(f" ({line})" for line in left_out if f"strategy {name!r} " in line)
        raise ConfigurationError(
            f"{what} of the pool but {name!r} is none of its {len(names)}{why}; use "
            f"{', '.join(map(repr, names))}"
        )


def _check_limits_given_once(pool: Pool, hydraulis: HydraulisConfig) -> None:
    limit = hydraulis.max_tokens_per_micro_batch
    for strategy in pool.strategies:
        if limit is not None and strategy.token_limits:
            raise ConfigurationError(
                f"--max-tokens-per-micro-batch {limit} is for all strategies but "
                f"{strategy.name!r} of --strategy-pool {hydraulis.strategy_pool} has a max_tokens "
                f"of its own; remove one of them"
            )


def check_vocabulary_parts(pool: Pool, padded_size: int) -> None:
    """Raise StrategyError unless the vocabulary is cut evenly by every tp of the pool at once.

    The padded vocabulary belongs to the model, so it does not follow the pool.
    """
    num_parts = pool.tp_lcm
    if padded_size % num_parts:
        degrees = sorted({s.tp for strategy in pool.strategies for s in strategy.schemes})
        wanted = math.ceil(padded_size / num_parts) * num_parts
        raise StrategyError(
            f"every tp must divide the padded vocabulary size but of tp "
            f"{', '.join(map(str, degrees))} not all do: it is {padded_size}, not a multiple of "
            f"{num_parts}; give --make-vocab-size-divisible-by a multiple of {num_parts}, or "
            f"--padded-vocab-size {wanted}"
        )
