"""What a replica can do within a time, by its number of micro-batches.

A replica that has to finish by T with v micro-batches does at most ``X_v(T) - v·c`` of work: X_v(T)
is T itself for one stage and follows from the best shape of the pipeline for more. It holds at
most ``v·limit`` tokens. Both together are a **mode** of its class.

Long sequences spoil a pipeline's shape, see lumps.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.planner.lumps import lump_orders
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.pipeline_shape import MAX_SHAPED_MICRO_BATCHES, most_work_ms

__all__ = ["Mode", "ReplicaClass", "Tier", "class_modes", "largest_micro_batch_ms"]

# Numbers of micro-batches with room for all tokens that are looked at one by one, before the next
# stands for all larger ones.
_NUM_COUNTED = 2


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas of equal cost."""

    cost: SchemeCost
    replicas: tuple[int, ...]
    """Their places in the strategy."""

    @property
    def num_replicas(self) -> int:
        """How many there are."""
        return len(self.replicas)

    @staticmethod
    def of(costs: Sequence[SchemeCost]) -> "tuple[ReplicaClass, ...]":
        """The classes of replicas with these costs, in the order of their first replica."""
        members: dict[SchemeCost, list[int]] = {}
        for replica, cost in enumerate(costs):
            members.setdefault(cost, []).append(replica)
        return tuple(ReplicaClass(cost, tuple(places)) for cost, places in members.items())


@dataclass(frozen=True, slots=True)
class Mode:
    """What a replica of a class can do within a time with num_micro_batches micro-batches."""

    replica_class: int
    num_micro_batches: int
    work_ms: float
    """Most ``Σ a·s² + b·s``."""
    num_tokens: int
    """Most tokens: those that fit, or those that the work allows."""
    packs_all: bool
    """Whether sequences are not counted per micro-batch: with half the room to spare they can be
    packed however long they are. Such a mode also stands for larger numbers of micro-batches."""
    tier: "Tier"


@dataclass(frozen=True, slots=True)
class Tier:
    """Replicas of a class by the long sequences that they hold."""

    longest: int
    """No sequence above it is in the tier."""
    lumps: tuple[int, ...] = ()
    """Lengths of sequences that each replica holds at least, falling."""
    shortest_lump: int = 0
    """The shortest sequence that makes a lump, where lumps are counted; else 0."""
    most_lumps: int = 0
    """So many of them a replica can hold at most within the time."""
    num_least: int = 0
    """Replicas that are in the tier whatever the dispatch."""


def largest_micro_batch_ms(cost: SchemeCost, longest: int) -> float:
    """The most that a micro-batch can take: as many tokens as fit, all in longest sequences."""
    a, b = cost.coefficients.a_ms_per_token2, cost.coefficients.b_ms_per_token
    return (a * min(longest, cost.max_tokens) + b) * cost.max_tokens + cost.coefficients.c_ms


def class_modes(
    index: int,
    cost: SchemeCost,
    tier: Tier,
    time_ms: float,
    *,
    lengths: Sequence[int],
    num_tokens: int,
) -> list[Mode]:
    """The modes of a class's tier for a time, without those that another one beats.

    lengths: of the batch, rising; num_tokens: their sum. No number of micro-batches outside the
    list does more.
    """
    c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
    largest_ms = largest_micro_batch_ms(cost, tier.longest)
    least_per_token_ms = cost.sequence_time_ms(lengths[0]) / lengths[0]
    orders = lump_orders(tier.lumps, cost) if tier.lumps else None
    found: list[Mode] = []
    most_roomy_ms = 0.0
    num_roomy = 0
    for num in range(1, len(lengths) + 1):
        # A pipeline fills and drains with at least the constant cost, so no larger number of
        # micro-batches does more than this.
        if time_ms - (num_stages - 1 + num) * c_ms < most_roomy_ms:
            break
        most_ms = most_work_ms(num_stages, num, time_ms, largest_ms)
        if orders is not None:
            most_ms = min(most_ms, orders.most_work_ms(num, time_ms))
        work_ms = most_ms - num * c_ms
        if work_ms < 0.0:
            continue
        # More tokens than there are, or than the work allows, are of no use.
        useful = num_tokens
        if least_per_token_ms > 0.0:
            useful = min(useful, math.ceil(work_ms / least_per_token_ms))
        room = num * cost.max_tokens
        num_roomy += room >= useful
        # First fit fails only where two micro-batches are more than full together.
        packs_all = room >= 2 * useful or num_roomy > _NUM_COUNTED
        found.append(Mode(index, num, work_ms, min(room, useful), packs_all, tier))
        if packs_all:
            most_roomy_ms = max(most_roomy_ms, work_ms)
            if num_stages == 1 or num > MAX_SHAPED_MICRO_BATCHES:
                break
    kept: list[Mode] = []
    for mode in found:
        if not any(_does_all_of(other, mode) for other in kept):
            kept = [other for other in kept if not _does_all_of(mode, other)]
            kept.append(mode)
    return kept


def _does_all_of(mode: Mode, other: Mode) -> bool:
    packs_all_of = mode.packs_all or (
        not other.packs_all and mode.num_micro_batches >= other.num_micro_batches
    )
    return packs_all_of and mode.work_ms >= other.work_ms and mode.num_tokens >= other.num_tokens
