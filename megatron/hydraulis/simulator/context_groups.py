"""Training that knows context parallelism alone: one tp, groups of ranks of different cp widths.

That is what FlexSP (arXiv 2412.01523) and other dynamic context parallelism can choose from:
weights stay as they are, so tp is fixed and there is no pipeline. Widths are powers of two. A
strategy lasts an iteration here; FlexSP may group the ranks anew for every micro-batch, which helps
it where groups wait for one another at each of them, as under ZeRO-3.

Where a scheme with cp was not measured it is **assumed** that cp ranks share the work of one evenly
and hold cp times its tokens, that a micro-batch costs the same c, and that keys and values go round
a ring, which nothing hides, if model and links are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["ContextGroupCosts", "context_group_pools"]

_MS_PER_S = 1e3
# Keys and values once in the forward; they and their gradients in the backward.
_NUM_RING_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroupCosts:
    """CostModel: a cost profile, with what is assumed of cp where it has no row."""

    profile: ProfileCostModel
    shape: ModelShape | None = None
    cluster: Cluster | None = None
    link_fraction: float = 1.0
    """Share of a link's bandwidth that is reached."""
    parameter_bytes: int = 2
    """Of a key's or value's element."""

    @property
    def knows_exchange(self) -> bool:
        """Whether what cp costs beside the work is known: measured, or from model and links."""
        has_rows = any(row.scheme.cp > 1 for row in self.profile.schemes)
        return has_rows or (self.shape is not None and self.cluster is not None)

    def is_measured(self, scheme: Scheme) -> bool:
        """Whether the profile has the scheme."""
        return any(row.scheme == scheme for row in self.profile.schemes)

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Of the profile, or as assumed; StrategyError where it lacks the scheme at cp 1."""
        if self.is_measured(scheme):
            return self.profile.coefficients(scheme)
        one = self.profile.coefficients(Scheme(tp=scheme.tp, pp=scheme.pp))
        return Coefficients(
            a_ms_per_token2=one.a_ms_per_token2 / scheme.cp,
            b_ms_per_token=one.b_ms_per_token / scheme.cp + self._ring_ms_per_token(scheme),
            c_ms=one.c_ms,
        )

    def max_tokens(self, scheme: Scheme) -> int:
        """Of the profile, or cp times what it holds at cp 1."""
        if self.is_measured(scheme):
            return self.profile.max_tokens(scheme)
        return scheme.cp * self.profile.max_tokens(Scheme(tp=scheme.tp, pp=scheme.pp))

    def overhead_ms(self, strategy: Strategy) -> float:
        """As the profile says."""
        return self.profile.overhead_ms(strategy)

    def _ring_ms_per_token(self, scheme: Scheme) -> float:
        if self.shape is None or self.cluster is None:
            return 0.0
        link = self.cluster.point_to_point(scheme.tp * scheme.cp)
        key_value_size = 2 * self.shape.num_query_groups * self.shape.kv_channels
        num_bytes = (scheme.cp - 1) / scheme.cp * key_value_size * self.parameter_bytes / scheme.tp
        rounds = _NUM_RING_ROUNDS * self.shape.num_layers
        return _MS_PER_S * rounds * num_bytes / (link.bytes_per_s * self.link_fraction)


def context_group_pools(
    costs: ContextGroupCosts, *, num_ranks: int, ranks_per_node: int, longest: int
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
