"""Upstream's flag of context parallelism: which way its ranks exchange keys and values."""

import argparse
from collections.abc import Callable

from megatron.hydraulis.context_ways import CP_COMM_TYPES, all_to_all_refusal
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool

__all__ = ["check_all_to_all", "check_context"]


def check_context(args: argparse.Namespace, pool: Pool, shape: ModelShape) -> None:
    """Raise ConfigurationError for a --cp-comm-type that is unknown, or that the heads rule out.

    Args:
        args: as parsed, our default in place.
        pool: the strategies of the run; each is checked in every size of group that it may run in.
        shape: of the model.
    """
    types = args.cp_comm_type
    if len(types) != 1 or types[0] not in CP_COMM_TYPES:
        raise ConfigurationError(
            f"--cp-comm-type takes 1 of {', '.join(CP_COMM_TYPES)} for all layers but was given "
            f"{len(types)}: {' '.join(types)}; give one of them"
        )
    check_all_to_all(args, pool, shape, all_to_all_refusal)


def check_all_to_all(
    args: argparse.Namespace,
    pool: Pool,
    shape: ModelShape,
    refusal_of: Callable[[int, int, int], str | None],
) -> None:
    """Raise ConfigurationError where --cp-comm-type a2a cannot share the heads out.

    Args:
        args: as parsed, our default in place.
        pool: the strategies of the run; each is checked in every size of group that it may run in.
        shape: of the model.
        refusal_of: from heads and query groups on a tp rank, and ranks of a group, to why not.
    """
    if args.cp_comm_type[0] != "a2a":
        return
    schemes = {scheme for strategy in pool.strategies for scheme in strategy.schemes}
    for scheme in sorted(schemes, key=str):
        for size in _group_sizes(scheme):
            refusal = refusal_of(
                shape.num_attention_heads // scheme.tp, shape.num_query_groups // scheme.tp, size
            )
            if refusal is not None:
                raise ConfigurationError(
                    f"--cp-comm-type a2a: scheme {scheme}: {refusal}; use --cp-comm-type auto, or "
                    f"a scheme of less cp or tp"
                )


def _group_sizes(scheme: Scheme) -> list[int]:
    """Ranks of the context-parallel groups that a replica may run in, those of one rank apart."""
    if not scheme.splits_cp:
        return [scheme.cp] if scheme.cp > 1 else []
    return [1 << power for power in range(1, scheme.cp.bit_length())]
