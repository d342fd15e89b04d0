"""How the ranks of a context-parallel group bring queries and keys together, chosen by cost.

Ints only: nothing here needs torch, so flags and strategies can be checked before a model is built.
"""

from __future__ import annotations

from typing import Literal

from megatron.hydraulis.errors import ConfigurationError

__all__ = [
    "CP_COMM_TYPES",
    "Way",
    "all_to_all_elements",
    "all_to_all_refusal",
    "choose_way",
    "gather_elements",
    "takes_all_to_all",
    "te_all_to_all_refusal",
]


Way = Literal["all_gather", "a2a"]
"""``all_gather``: every rank gathers the keys and values of the row. ``a2a``: an all-to-all turns a
part of the tokens with all heads into all tokens with a part of the heads, and back (Ulysses)."""

CP_COMM_TYPES = ("auto", "p2p", "all_gather", "a2a")
"""Values of --cp-comm-type: ``auto`` is the cheaper way of those that the heads allow. ``p2p``, a
ring of keys and values, moves what ``all_gather`` does, in steps; outside Transformer Engine it is
run as ``all_gather``."""


def gather_elements(num_groups: int, context_size: int) -> float:
    """What a rank receives to gather keys and values of its group, forward and backward.

    3 · 2 · groups · (c − 1): keys and values of all others in the forward, the same again in the
    backward, which also brings the gradients of both back.

    Args:
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Returns:
        Head vectors per local token; times tokens, head size and bytes of an element for bytes.
    """
    return 3.0 * 2 * num_groups * (context_size - 1)


def all_to_all_elements(num_heads: int, num_groups: int, context_size: int) -> float:
    """What a rank receives to exchange tokens for heads and back, forward and backward.

    2 · (2 · heads + 2 · groups) · (c − 1) / c: queries, keys, values there and the outcome back, of
    which each rank keeps a c-th; their gradients the other way. Fewer groups than ranks are
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
    """Why heads cannot be shared out over a group, with rule and numbers; None where they can.

    Query heads have to be a multiple of c, since each rank gets as many; key and value heads a
    multiple or a divisor, since each rank gets those of its query heads.

    Args:
        num_heads: query heads on this rank, after tensor parallelism.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.
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
    """As `all_to_all_refusal`, of Transformer Engine's: it does not repeat key and value heads."""
    if num_heads % context_size == 0 and num_groups % context_size == 0:
        return None
    return (
        f"Transformer Engine's a2a over {context_size} context-parallel ranks needs multiples of "
        f"{context_size} heads and query groups on a tensor-parallel rank but there are "
        f"{num_heads} and {num_groups}"
    )


def choose_way(cp_comm_type: str, num_heads: int, num_groups: int, context_size: int) -> Way:
    """The way for a group of this size; equal on all its ranks.

    Args:
        cp_comm_type: one of `CP_COMM_TYPES`.
        num_heads: query heads on this rank, after tensor parallelism.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` where the heads do not allow it.
    """
    refusal = all_to_all_refusal(num_heads, num_groups, context_size)
    takes = takes_all_to_all(cp_comm_type, num_heads, num_groups, context_size, refusal)
    return "a2a" if takes else "all_gather"


def takes_all_to_all(
    cp_comm_type: str, num_heads: int, num_groups: int, context_size: int, refusal: str | None
) -> bool:
    """Whether a group exchanges tokens for heads: where told to, or where it moves less.

    Args as of `choose_way`; refusal says why the software at hand cannot, None where it can.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` that is refused.
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
