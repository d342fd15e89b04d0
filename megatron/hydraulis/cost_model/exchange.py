"""What the ranks of a context-parallel group exchange in a layer, by the way that they take."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.hydraulis.cost_model.context import (
    NUM_RING_ROUNDS,
    NUM_RING_ROUNDS_FORWARD,
    ring_bytes_per_token,
)
from megatron.hydraulis.cost_model.context_ways import all_to_all_elements, choose_way
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

__all__ = ["Exchange", "exchange_of"]

_NUM_ALL_TO_ALLS_FORWARD = 2
"""Tokens for heads, and back."""
_NUM_PASSES = 2
"""The backward exchanges gradients as the forward does what they belong to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Of one layer, on one rank."""

    forward_bytes: float
    """Received in the forward, for every token of the group."""
    total_bytes: float
    """Forward and backward."""
    forward_messages: int
    """One after the other."""
    total_messages: int


def exchange_of(
    shape: ModelShape, scheme: Scheme, parameter_bytes: int, cp_comm_type: str
) -> Exchange:
    """What follows from --cp-comm-type, a ring and an all-gather alike.

    Both move keys and values of the others, again in the backward, and their gradients; an
    all-to-all queries, keys, values and the outcome (`all_to_all_elements`).

    Args:
        shape: of the model.
        scheme: a splitting one counts at its full width.
        parameter_bytes: of an element.
        cp_comm_type: one of `context_ways.CP_COMM_TYPES`.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` where the heads do not allow it.
    """
    cp = scheme.cp
    if cp == 1:
        return Exchange(forward_bytes=0.0, total_bytes=0.0, forward_messages=0, total_messages=0)
    num_heads = shape.num_attention_heads // scheme.tp
    num_groups = shape.num_query_groups // scheme.tp
    if choose_way(cp_comm_type, num_heads, num_groups, cp) == "a2a":
        of_a_head = shape.kv_channels * parameter_bytes
        moved = all_to_all_elements(num_heads, num_groups, cp) * of_a_head / cp
        return Exchange(
            forward_bytes=moved / _NUM_PASSES,
            total_bytes=moved,
            forward_messages=_NUM_ALL_TO_ALLS_FORWARD,
            total_messages=_NUM_PASSES * _NUM_ALL_TO_ALLS_FORWARD,
        )
    round_bytes = ring_bytes_per_token(shape, scheme, parameter_bytes)
    return Exchange(
        forward_bytes=NUM_RING_ROUNDS_FORWARD * round_bytes,
        total_bytes=NUM_RING_ROUNDS * round_bytes,
        forward_messages=NUM_RING_ROUNDS_FORWARD * (cp - 1),
        total_messages=NUM_RING_ROUNDS * (cp - 1),
    )
