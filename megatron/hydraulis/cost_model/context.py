"""Context parallelism: how ranks of a group exchange keys and values, and what widths cost.

Nothing here needs torch, so flags and strategies can be checked before a model is built.

A cost profile has rows for some widths of a scheme ⟨tp, pp, layers⟩. The costs of any other width
cp follow from the nearest measured one, m, with coefficients a_m, b_m, c_m and limit M_m. It is
**assumed** that ranks share work and memory evenly, as zigzag chunks allow (arXiv 2412.01523
assumes the same), and that keys and values go round a ring without overlapping with compute:

    a = a_m · m/cp
    b = (b_m - x(m)) · m/cp + x(cp)
    c = c_m                                     launches do not become fewer
    max_tokens = M_m · cp/m                     padding of the sequences included

    x(cp) = 3 · L · (cp-1)/cp · 2·kv · bytes / tp / bandwidth

x is the exchange per token: keys and values, kv entries each, once in the forward, and they and
their gradients in the backward, in the L layers of the longest stage over the link between
neighbours of the group; without model and cluster it is 0. With m = 1: a/cp, b/cp + x, c and M·cp.
Parameters are not split by cp, so M·cp is too much: with a memory model of limits P, max_tokens is
at most M_m · P(cp)/P(m).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy

Way = Literal["all_gather", "a2a"]
"""``all_gather``: every rank gathers the keys and values of the row. ``a2a``: an all-to-all turns a
part of the tokens with all heads into all tokens with a part of the heads, and back (Ulysses)."""

CP_COMM_TYPES = ("auto", "p2p", "all_gather", "a2a")
"""Values of --cp-comm-type: ``auto`` is the cheaper way that the heads allow. ``p2p``, a ring of
keys and values, moves as much as ``all_gather`` does, in steps; without Transformer Engine it runs
as ``all_gather``."""

_MS_PER_S = 1e3
_NUM_RING_ROUNDS_FORWARD = 1
# Keys and values in the forward; they and their gradients in the backward.
_NUM_RING_ROUNDS = 3
# Tokens for heads, and back.
_NUM_ALL_TO_ALLS_FORWARD = 2
# The backward exchanges a gradient for every tensor that the forward exchanges.
_NUM_PASSES = 2


def gather_elements(num_groups: int, context_size: int) -> float:
    """What a rank receives to gather keys and values of its group, forward and backward.

    3 · 2 · groups · (c − 1): keys and values of all others in the forward, the same again in the
    backward, which also returns the gradients of both.

    Args:
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Returns:
        Head vectors per local token; times tokens, head size and bytes of an element for bytes.
    """
    return 3.0 * 2 * num_groups * (context_size - 1)


def all_to_all_elements(num_heads: int, num_groups: int, context_size: int) -> float:
    """What a rank receives to exchange tokens for heads and back, forward and backward.

    2 · (2 · heads + 2 · groups) · (c − 1) / c: queries, keys and values there and the output back,
    of which each rank keeps a c-th; their gradients the other way. Fewer groups than ranks are
    repeated up to c.

    Args:
        num_heads: query heads on this rank.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Returns:
        Head vectors per local token, as `gather_elements`.
    """
    num_sent = 2 * num_heads + 2 * max(num_groups, context_size)
    return 2.0 * num_sent * (context_size - 1) / context_size


def all_to_all_refusal(num_heads: int, num_groups: int, context_size: int) -> str | None:
    """Why a group cannot divide the heads, with rule and numbers; None if it can.

    Query heads must be a multiple of c, since each rank gets as many; key and value heads a
    multiple or a divisor, since each rank gets those of its query heads. Arguments are those of
    `all_to_all_elements`.
    """
    if num_heads % context_size:
        return (
            f"a2a over {context_size} context-parallel ranks needs a multiple of {context_size} "
            f"query heads on a tensor-parallel rank but there are {num_heads}"
        )
    if num_groups % context_size and context_size % num_groups:
        return (
            f"a2a over {context_size} context-parallel ranks needs query groups on a "
            f"tensor-parallel rank that are a multiple or a divisor of {context_size} but there "
            f"are {num_groups}"
        )
    return None


def te_all_to_all_refusal(num_heads: int, num_groups: int, context_size: int) -> str | None:
    """`all_to_all_refusal` for Transformer Engine, which does not repeat key and value heads."""
    if num_heads % context_size == 0 and num_groups % context_size == 0:
        return None
    return (
        f"Transformer Engine's a2a over {context_size} context-parallel ranks needs multiples of "
        f"{context_size} heads and query groups on a tensor-parallel rank but there are "
        f"{num_heads} and {num_groups}"
    )


def choose_way(cp_comm_type: str, num_heads: int, num_groups: int, context_size: int) -> Way:
    """The way of a group; equal on all its ranks.

    Args:
        cp_comm_type: one of `CP_COMM_TYPES`.
        num_heads: query heads on this rank, after tensor parallelism.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` although the heads do not allow it.
    """
    refusal = all_to_all_refusal(num_heads, num_groups, context_size)
    takes = takes_all_to_all(cp_comm_type, num_heads, num_groups, context_size, refusal)
    return "a2a" if takes else "all_gather"


def takes_all_to_all(
    cp_comm_type: str, num_heads: int, num_groups: int, context_size: int, refusal: str | None
) -> bool:
    """Whether a group exchanges tokens for heads: if the flag says so, or if it moves less.

    Arguments and errors are those of `choose_way`; refusal says why the available software cannot,
    None if it can.
    """
    if cp_comm_type not in CP_COMM_TYPES:
        raise ConfigurationError(
            f"--cp-comm-type {cp_comm_type} is none of the {len(CP_COMM_TYPES)} that are known; "
            f"choose one of {', '.join(CP_COMM_TYPES)}"
        )
    if cp_comm_type == "a2a" and refusal is not None:
        raise ConfigurationError(
            f"{refusal}; use --cp-comm-type auto, or a strategy of a cp that fits"
        )
    if cp_comm_type != "auto":
        return cp_comm_type == "a2a"
    exchange = all_to_all_elements(num_heads, num_groups, context_size)
    return refusal is None and exchange < gather_elements(num_groups, context_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What the ranks of a context-parallel group exchange in one layer, on one rank."""

    forward_bytes: float
    """Received in the forward, for every token of the group."""
    total_bytes: float
    """Received in forward and backward."""
    forward_messages: int
    """One after the other."""
    total_messages: int


def exchange_of(
    shape: ModelShape, scheme: Scheme, parameter_bytes: int, cp_comm_type: str
) -> Exchange:
    """The exchange by the way that --cp-comm-type chooses; a ring and an all-gather move the same.

    Args:
        shape: of the model.
        scheme: a splitting one counts at its full width.
        parameter_bytes: of an element.
        cp_comm_type: one of `CP_COMM_TYPES`.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` although the heads do not allow it.
    """
    cp = scheme.cp
    if cp == 1:
        return Exchange(forward_bytes=0.0, total_bytes=0.0, forward_messages=0, total_messages=0)
    num_heads = shape.num_attention_heads // scheme.tp
    num_groups = shape.num_query_groups // scheme.tp
    if choose_way(cp_comm_type, num_heads, num_groups, cp) == "a2a":
        bytes_per_head = shape.kv_channels * parameter_bytes
        moved = all_to_all_elements(num_heads, num_groups, cp) * bytes_per_head / cp
        return Exchange(
            forward_bytes=moved / _NUM_PASSES,
            total_bytes=moved,
            forward_messages=_NUM_ALL_TO_ALLS_FORWARD,
            total_messages=_NUM_PASSES * _NUM_ALL_TO_ALLS_FORWARD,
        )
    round_bytes = ring_bytes_per_token(shape, scheme, parameter_bytes)
    return Exchange(
        forward_bytes=_NUM_RING_ROUNDS_FORWARD * round_bytes,
        total_bytes=_NUM_RING_ROUNDS * round_bytes,
        forward_messages=_NUM_RING_ROUNDS_FORWARD * (cp - 1),
        total_messages=_NUM_RING_ROUNDS * (cp - 1),
    )


def ring_bytes_per_token(shape: ModelShape, scheme: Scheme, parameter_bytes: int) -> float:
    """What a rank sends of a layer's keys and values, once round the ring of its cp group, for
    every token of the group; parameter_bytes is the size of an element."""
    num_entries = 2 * shape.num_query_groups * shape.kv_channels
    return (scheme.cp - 1) / scheme.cp * num_entries * parameter_bytes / scheme.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCosts:
    """CostModel: a cost profile, extended to cp widths that were not measured.

    The formulas are those of the module. A splitting scheme, cp8~, counts at its full width.
    """

    profile: ProfileCostModel
    shape: ModelShape | None = None
    """Of the model; without it, or without cluster, the exchange of keys and values is free."""
    cluster: Cluster | None = None
    link_fraction: float = 1.0
    """Share of a link's bandwidth that is reached."""
    parameter_bytes: int = 2
    """Of an element of a key or value."""
    memory_tokens: Callable[[Scheme], int] | None = None
    """`MemoryModel.max_tokens` of the job; without it limits grow as cp."""

    @classmethod
    def of(
        cls,
        profile: ProfileCostModel,
        regroup: RegroupCosts,
        memory_tokens: Callable[[Scheme], int] | None = None,
    ) -> ContextCosts:
        """With the model and the links that regrouping has."""
        return cls(
            profile=profile,
            shape=regroup.shape,
            cluster=regroup.cluster,
            link_fraction=regroup.link_fraction,
            parameter_bytes=regroup.parameter_bytes,
            memory_tokens=memory_tokens,
        )

    @property
    def knows_exchange(self) -> bool:
        """Whether the overhead of cp is known: measured, or from model and links."""
        has_rows = any(row.scheme.cp > 1 for row in self.profile.schemes)
        return has_rows or (self.shape is not None and self.cluster is not None)

    def is_measured(self, scheme: Scheme) -> bool:
        """Whether the profile has the scheme itself."""
        full_width = scheme.of_context_group(scheme.cp)
        return any(row.scheme == full_width and not row.is_assumed for row in self.profile.schemes)

    def with_widths(self, num_ranks: int) -> ProfileCostModel:
        """The profile with rows for all cp that are powers of two and have room in a job.

        Without model and cluster it is unchanged: the exchange would be free.
        """
        if self.shape is None or self.cluster is None:
            return self.profile
        known = {row.scheme for row in self.profile.schemes}
        assumed = [
            scheme
            for row in self.profile.schemes
            for power in range(1, (num_ranks // row.scheme.num_ranks).bit_length())
            if row.scheme.cp == 1
            and row.max_tokens
            and (scheme := row.scheme.of_context_group(1 << power)) not in known
        ]
        rows = (
            ProfiledScheme(
                scheme=scheme,
                coefficients=self.coefficients(scheme),
                max_tokens=self.max_tokens(scheme),
                is_assumed=True,
            )
            for scheme in assumed
        )
        return replace(self.profile, schemes=(*self.profile.schemes, *rows))

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Measured or assumed; StrategyError if the profile has no width of the scheme."""
        row = self._nearest(scheme)
        times = row.coefficients
        if row.scheme.cp == scheme.cp:
            return times
        per_width = row.scheme.cp / scheme.cp
        shared_ms = max(0.0, times.b_ms_per_token - self._exchange_ms_per_token(row.scheme))
        return replace(
            times,
            a_ms_per_token2=times.a_ms_per_token2 * per_width,
            b_ms_per_token=shared_ms * per_width + self._exchange_ms_per_token(scheme),
        )

    def max_tokens(self, scheme: Scheme) -> int:
        """Measured or assumed; StrategyError if the profile has no width of the scheme."""
        row = self._nearest(scheme)
        limit = row.max_tokens * scheme.cp // row.scheme.cp
        if self.memory_tokens is None or row.scheme.cp == scheme.cp:
            return limit
        of_row = self.memory_tokens(row.scheme)
        if not of_row:  # the row was measured, so the memory model is too strict here
            return limit
        return min(limit, row.max_tokens * self.memory_tokens(scheme) // of_row)

    def overhead_ms(self, strategy: Strategy) -> float:
        """The profile's, computed with the assumed times of widths that it lacks."""
        return self.profile.overhead_ms(strategy, self)

    def _nearest(self, scheme: Scheme) -> ProfiledScheme:
        """The measured width fewest doublings away; the narrower of two equally near ones."""
        same_shape = (scheme.tp, scheme.pp, scheme.layers)
        rows = [
            row
            for row in self.profile.schemes
            if (row.scheme.tp, row.scheme.pp, row.scheme.layers) == same_shape
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
        # Coefficients are those of one stage.
        rounds = _NUM_RING_ROUNDS * max(scheme.layers_per_stage(self.shape.num_layers))
        return _MS_PER_S * rounds * num_bytes / (link.bytes_per_s * self.link_fraction)
