"""What a group of context-parallel ranks costs where its width was not measured.

A cost profile has rows for some widths of a scheme ⟨tp, pp, layers⟩. Any other width cp follows
from the nearest measured one, m, of coefficients a_m, b_m, c_m and limit M_m. It is **assumed**
that ranks share work and memory evenly, as zigzag chunks let them (arXiv 2412.01523 assumes the
same), and that keys and values go round a ring, which nothing hides:

    a = a_m · m/cp
    b = (b_m - x(m)) · m/cp + x(cp)
    c = c_m                                     launches do not become fewer
    max_tokens = M_m · cp/m                     padding of the sequences included

    x(cp) = 3 · L · (cp-1)/cp · 2·kv · bytes / tp / bandwidth

x is the exchange per token: keys and values, kv entries each, once in the forward, they and their
gradients in the backward, in all L layers over the link between neighbours of the group; without
model and cluster it is 0. With m = 1: a/cp, b/cp + x, c and M·cp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.interface import Coefficients, given_limit
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy

__all__ = ["NUM_RING_ROUNDS", "NUM_RING_ROUNDS_FORWARD", "ContextCosts", "ring_bytes_per_token"]

_MS_PER_S = 1e3
NUM_RING_ROUNDS_FORWARD = 1
"""Keys and values go round once in the forward."""
NUM_RING_ROUNDS = 3
"""They and their gradients in the backward, too."""


def ring_bytes_per_token(shape: ModelShape, scheme: Scheme, parameter_bytes: int) -> float:
    """What a rank sends of a layer's keys and values, once round the ring of its cp group, for
    every token of the group; parameter_bytes is the size of an element."""
    num_entries = 2 * shape.num_query_groups * shape.kv_channels
    return (scheme.cp - 1) / scheme.cp * num_entries * parameter_bytes / scheme.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCosts:
    """CostModel: a cost profile, with what is assumed of the cp widths that it lacks.

    The formulas are those of the module. A splitting scheme, cp8~, counts at its full width.
    """

    profile: ProfileCostModel
    shape: ModelShape | None = None
    """Of the model; without it, or without cluster, the exchange of keys and values is free."""
    cluster: Cluster | None = None
    link_fraction: float = 1.0
    """Share of a link's bandwidth that is reached."""
    parameter_bytes: int = 2
    """Of a key's or value's element."""
    max_tokens_per_micro_batch: int | None = None
    """Takes the place of all limits of the profile, measured or not; see given_limit."""

    @property
    def knows_exchange(self) -> bool:
        """Whether what cp costs beside the work is known: measured, or from model and links."""
        has_rows = any(row.scheme.cp > 1 for row in self.profile.schemes)
        return has_rows or (self.shape is not None and self.cluster is not None)

    def is_measured(self, scheme: Scheme) -> bool:
        """Whether the profile has the scheme itself."""
        return any(row.scheme == _at_full_width(scheme) for row in self.profile.schemes)

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Of the profile, or as assumed; StrategyError where it has the scheme at no width."""
        row = self._nearest(scheme)
        times = row.coefficients
        if row.scheme.cp == scheme.cp:
            return times
        per_width = row.scheme.cp / scheme.cp
        shared_ms = max(0.0, times.b_ms_per_token - self._exchange_ms_per_token(row.scheme))
        return Coefficients(
            a_ms_per_token2=times.a_ms_per_token2 * per_width,
            b_ms_per_token=shared_ms * per_width + self._exchange_ms_per_token(scheme),
            c_ms=times.c_ms,
        )

    def max_tokens(self, scheme: Scheme) -> int:
        """Of the profile, or as assumed; StrategyError where it has the scheme at no width."""
        if self.max_tokens_per_micro_batch is not None:
            return given_limit(self.max_tokens_per_micro_batch, scheme)
        row = self._nearest(scheme)
        return row.max_tokens * scheme.cp // row.scheme.cp

    def overhead_ms(self, strategy: Strategy) -> float:
        """As the profile says."""
        return self.profile.overhead_ms(strategy)

    def _nearest(self, scheme: Scheme) -> ProfiledScheme:
        """The measured width fewest doublings away; of two equally near, the narrower."""
        alike = (scheme.tp, scheme.pp, scheme.layers)
        rows = [
            row
            for row in self.profile.schemes
            if (row.scheme.tp, row.scheme.pp, row.scheme.layers) == alike
        ]
        if not rows:
            known = ", ".join(str(row.scheme) for row in self.profile.schemes)
            raise StrategyError(
                f"scheme {scheme}: a width of cp is estimated from another of the same tp, pp and "
                f"layers but the cost profile of {self.profile.device} has {known}; measure "
                f"{Scheme(scheme.tp, pp=scheme.pp, layers=scheme.layers)}, or take strategies of "
                f"these schemes"
            )

        def order(row: ProfiledScheme) -> tuple[float, int]:
            return abs(math.log2(row.scheme.cp / scheme.cp)), row.scheme.cp

        return min(rows, key=order)

    def _exchange_ms_per_token(self, scheme: Scheme) -> float:
        if self.shape is None or self.cluster is None:
            return 0.0
        link = self.cluster.point_to_point(scheme.tp * scheme.cp)
        num_bytes = ring_bytes_per_token(self.shape, scheme, self.parameter_bytes)
        rounds = NUM_RING_ROUNDS * self.shape.num_layers
        return _MS_PER_S * rounds * num_bytes / (link.bytes_per_s * self.link_fraction)


def _at_full_width(scheme: Scheme) -> Scheme:
    return Scheme(scheme.tp, scheme.cp, scheme.pp, scheme.layers)
