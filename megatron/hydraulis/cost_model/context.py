"""Context parallelism: how ranks of a group exchange keys and values.

Nothing here needs torch, so flags and strategies can be checked before a model is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

Way = Literal["all_gather", "a2a", "p2p"]
"""``all_gather``: every rank gathers the keys and values of the row. ``a2a``: an all-to-all turns a
part of the tokens with all heads into all tokens with a part of the heads, and back (Ulysses).
``p2p``: keys and values go round a ring while the rank attends to those that it has."""

CP_COMM_TYPES = ("auto", "p2p", "all_gather", "a2a")
"""Values of --cp-comm-type: ``auto`` is a ring that hides behind attention, else the way that moves
less of those that the heads allow. ``p2p`` moves as much as ``all_gather`` does, in steps that
overlap with attention; only Transformer Engine has it, without windows; elsewhere it runs as
``all_gather``."""

# Sequences for which a group of c ranks is made have so many tokens a rank, or more.
_TOKENS_PER_RANK = 4096
# FLOPs of attention in the time of a byte on the link: B200's 2,250 TFLOP/s, of which attention
# reaches 0.6, over 0.73 of 900 GB/s inside a node and 0.8 of 50 GB/s across nodes. Older devices
# have fewer (H100 1,700 inside, A100 900), so a ring that hides there hides everywhere.
_FLOPS_PER_BYTE, _FLOPS_PER_NETWORK_BYTE = 2_055.0, 33_750.0
# GPUs of the smallest usual domain of NVLink.
_RANKS_OF_A_NODE = 8
_ELEMENT_BYTES = 2
# Scores and their product with the values, causal; 2.5 times in the backward (arXiv 2307.08691).
_FLOPS_OF_ATTENTION = 3.5 * 2
# Keys and values in the forward; they and their gradients in the backward.
_NUM_RING_ROUNDS = 3
# Tokens for heads, and back.
_NUM_ALL_TO_ALLS_FORWARD = 2
# The backward exchanges a gradient for every tensor that the forward exchanges.
_NUM_PASSES = 2


def check_cp_comm_type(types: Sequence[str]) -> None:
    """Raise ConfigurationError unless --cp-comm-type has one known value."""
    if len(types) != 1 or types[0] not in CP_COMM_TYPES:
        raise ConfigurationError(
            f"--cp-comm-type takes 1 of {', '.join(CP_COMM_TYPES)} for all layers but was given "
            f"{len(types)}: {' '.join(types)}; give one of them"
        )


def gather_elements(num_groups: int, context_size: int) -> float:
    """What a rank receives to gather keys and values of its group, forward and backward.

    3 · 2 · groups · (c - 1): keys and values of all others in the forward, the same again in the
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

    2 · (2 · heads + 2 · groups) · (c - 1) / c: queries, keys and values there and the output back,
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


def ring_is_faster(num_heads: int, num_groups: int, context_size: int, num_ranks: int) -> bool:
    """Returns whether what a ring exposes takes less time than an all-to-all, on any known device.

    Both are of one sequence of 4,096 tokens a rank, forward and backward. Bytes and FLOPs per local
    token are proportional to the head size. A ring hides behind all but the last of c steps.

    Args:
        num_heads: query heads on this rank.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.
        num_ranks: tp · c, neighbouring ranks.
    """
    is_inside = num_ranks <= _RANKS_OF_A_NODE
    flops_per_element = (_FLOPS_PER_BYTE if is_inside else _FLOPS_PER_NETWORK_BYTE) * _ELEMENT_BYTES
    row_tokens = context_size * _TOKENS_PER_RANK
    overlapping = (1.0 - 1.0 / context_size) * _FLOPS_OF_ATTENTION * num_heads * row_tokens
    exposed = gather_elements(num_groups, context_size) * flops_per_element - overlapping
    return exposed < all_to_all_elements(num_heads, num_groups, context_size) * flops_per_element


def choose_way(
    cp_comm_type: str,
    num_heads: int,
    num_groups: int,
    context_size: int,
    *,
    has_te: bool,
    tp: int = 1,
    has_windows: bool = False,
) -> Way:
    """The way of a group; equal on all its ranks. Runtime, memory and cost model ask this.

    Args:
        cp_comm_type: one of `CP_COMM_TYPES`.
        num_heads: query heads on this rank, after tensor parallelism.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.
        has_te: whether core attention is Transformer Engine's.
        tp: tensor-parallel ranks of each rank of the group.
        has_windows: whether some layer has a window, which a ring of Transformer Engine lacks.

    Raises:
        ConfigurationError: ``a2a`` although the heads do not allow it.
    """
    refused = te_all_to_all_refusal if has_te else all_to_all_refusal
    refusal = refused(num_heads, num_groups, context_size)
    if cp_comm_type == "a2a" and refusal is not None:
        raise ConfigurationError(
            f"{refusal}; use --cp-comm-type auto, or a strategy of a cp that fits"
        )
    exchange = all_to_all_elements(num_heads, num_groups, context_size)
    moves_less = exchange < gather_elements(num_groups, context_size)
    if has_te and cp_comm_type == "auto" and not has_windows:
        moves_less &= not ring_is_faster(num_heads, num_groups, context_size, tp * context_size)
    if cp_comm_type == "a2a" or (cp_comm_type == "auto" and refusal is None and moves_less):
        return "a2a"
    takes_ring = cp_comm_type == "p2p" or (cp_comm_type == "auto" and not has_windows)
    return "p2p" if has_te and takes_ring else "all_gather"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What the ranks of a context-parallel group exchange in one layer, on one rank."""

    way: Way | None
    """None for a group of one rank."""
    forward_bytes: float
    """Received in the forward, for every token of the group."""
    total_bytes: float
    """Received in forward and backward."""
    forward_messages: int
    """One after the other."""
    total_messages: int


def exchange_of(
    shape: ModelShape,
    scheme: Scheme,
    parameter_bytes: int,
    cp_comm_type: str,
    *,
    has_te: bool = False,
) -> Exchange:
    """The exchange by the way that --cp-comm-type chooses; a ring and an all-gather move the same.

    A splitting scheme counts at its full width. Arguments and errors are those of `choose_way`.
    """
    cp = scheme.cp
    if cp == 1:
        return Exchange(
            way=None, forward_bytes=0.0, total_bytes=0.0, forward_messages=0, total_messages=0
        )
    num_heads = shape.num_attention_heads // scheme.tp
    num_groups = shape.num_query_groups // scheme.tp
    # Mean over keys and values, or queries and outputs; only Transformer Engine's differ in size.
    values = shape.value_channels if has_te else shape.padded_channels
    bytes_per_head = (shape.padded_channels + values) / 2 * parameter_bytes
    way = choose_way(
        cp_comm_type,
        num_heads,
        num_groups,
        cp,
        has_te=has_te,
        tp=scheme.tp,
        has_windows=shape.window is not None,
    )
    if way == "a2a":
        moved = all_to_all_elements(num_heads, num_groups, cp) * bytes_per_head / cp
        return Exchange(
            way=way,
            forward_bytes=moved / _NUM_PASSES,
            total_bytes=moved,
            forward_messages=_NUM_ALL_TO_ALLS_FORWARD,
            total_messages=_NUM_PASSES * _NUM_ALL_TO_ALLS_FORWARD,
        )
    round_bytes = (cp - 1) / cp * (2 * shape.num_query_groups * bytes_per_head) / scheme.tp
    return Exchange(
        way=way,
        forward_bytes=round_bytes,
        total_bytes=_NUM_RING_ROUNDS * round_bytes,
        forward_messages=cp - 1,
        total_messages=_NUM_RING_ROUNDS * (cp - 1),
    )
