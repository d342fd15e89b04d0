"""Training that knows context parallelism alone: one tp, groups of ranks of different cp widths.

That is what FlexSP (arXiv 2412.01523) and other dynamic context parallelism can choose from:
weights stay as they are, so tp is fixed and there is no pipeline. Widths are powers of two. A
strategy lasts an iteration here; FlexSP may group the ranks anew for every micro-batch, which helps
it where groups wait for one another at each of them, as under ZeRO-3.

What a width costs that was not measured is assumed: see cost_model/context.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.hydraulis.cost_model.context import ContextCosts
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["context_group_pools"]


def context_group_pools(
    costs: ContextCosts, *, num_ranks: int, ranks_per_node: int, longest: int
) -> dict[int, Pool]:
    """By tp, the strategies of cp groups that hold a sequence of longest tokens.

    Of groups of at most two widths, and of widths halved down to 1. A tp is left out where the
    profile lacks it without pipeline, or nothing holds the sequence.
    """
    pools: dict[int, Pool] = {}
    degrees = sorted({row.scheme.tp for row in costs.profile.schemes if row.scheme.pp == 1})
    for tp in degrees:
        has_row = costs.is_measured(Scheme(tp=tp)) and costs.max_tokens(Scheme(tp=tp)) > 0
        if num_ranks % tp or not has_row:
            continue
        strategies = []
        for widths in _groupings(num_ranks // tp):
            if costs.max_tokens(Scheme(tp=tp, cp=widths[0])) < longest:
                continue
            terms = [f"{widths.count(cp)}*tp{tp}cp{cp}" for cp in dict.fromkeys(widths)]
            text = "+".join(terms)
            strategies.append(Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node))
        if strategies:
            pools[tp] = Pool.of(*strategies)
    return pools


def _groupings(num_columns: int) -> Iterator[tuple[int, ...]]:
    """Widths of groups, falling, that use every column; nothing where no power of two does."""
    found: dict[tuple[int, ...], None] = {}
    widest = 1 << (num_columns.bit_length() - 1)
    while widest:
        rest = num_columns - widest
        narrow = widest
        while narrow:
            if rest % narrow == 0:
                found[(widest, *(narrow,) * (rest // narrow))] = None
            narrow //= 2
        halved, width = [widest], widest
        while sum(halved) < num_columns:
            width = max(1, min(width // 2, 1 << ((num_columns - sum(halved)).bit_length() - 1)))
            halved.append(width)
        found[tuple(halved)] = None
        widest //= 2
    yield from found
