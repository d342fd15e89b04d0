"""Staging buffers of parameters and gradients in transit, and communicators, on a rank.

Staging on a device is one buffer for the call that needs most, a gather or a scatter: of a layer
with experts, one without, a part of the embedding, or in pipelines a set of them
(`transfer.calls`). An owner sends parameters and receives gradients, one copy of its share for each
holder; a role receives and sends in the arena itself or, if order or dtype of travel differ, its
part of the call. If transfers are relayed inside a node, what passes through is also there.

Other orders of the owners (`best_owner_orders`) are neglected.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.transfer.amounts import StrategyAmounts, amounts_of_model
from megatron.hydraulis.transfer.calls import calls_of
from megatron.hydraulis.transfer.collective import Collective, collective_of
from megatron.hydraulis.transfer.role import roles_of

_MAX_CACHED = 4096
NUM_GROUPS_OF_ALL = 2
"""Groups of all ranks: the job's and that of regrouping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFootprint:
    """Staging buffers and communicators that a job's pool needs, on the rank that needs most.

    Shares are of the largest layer.
    """

    share_as_owner: float
    """What an owner or relay sends and receives: its part, once for each rank that holds it, or
    only once in an all-gather."""
    share_as_role: float
    """What a role receives through staging: its part of a bucket, or nothing if it travels in the
    order in which it lies in memory, as with the largest tp."""
    share_sent_by_role: float
    """The same, or its part in any order if gradients travel in bf16."""
    share_relayed: float
    """What a rank relays for the others of its node."""
    weight_shapes: float
    """The rank's parts of a layer's matrices, one for each tp degree that it has: 1/tp in sum."""
    num_communicators: int
    """NCCL communicators once every strategy has been used."""
    num_peers: int
    """Ranks of its node to which a rank sends messages, at most: all others in regrouping; or its
    other cp ranks in attention, if all strategies gather and reduce by collectives."""
    gradient_bytes: int = FP32_BYTES
    """Size of a gradient on the wire."""
    num_adapted: int = 0
    """Parameters of the adapters in a call at most; 0 if everything is trained."""

    @classmethod
    def of(
        cls,
        pool: Pool,
        shape: ModelShape,
        *,
        gradient_bytes: int = FP32_BYTES,
        frozen: Frozen = NOTHING_FROZEN,
    ) -> "PoolFootprint":
        """The largest needs of all strategies of a pool for a model."""
        in_fp32 = gradient_bytes == FP32_BYTES
        shares = [
            _shares(strategy, pool.tp_lcm, shape, frozen, in_fp32=in_fp32)
            for strategy in pool.strategies
        ]
        as_owner, as_role, sent, relayed, num_peers = (
            max(column) for column in zip(*shares, strict=True)
        )
        return cls(
            share_as_owner=as_owner,
            share_as_role=as_role,
            share_sent_by_role=sent,
            share_relayed=relayed,
            weight_shapes=_weight_shapes(pool.strategies),
            num_communicators=num_communicators(pool),
            num_peers=int(num_peers),
            gradient_bytes=gradient_bytes,
            num_adapted=0 if frozen.lora is None else _most_adapted(shape, frozen.lora),
        )

    def staging_bytes(self, num_parameters_of_layer: int, parameter_bytes: int) -> float:
        """The buffer, which all strategies of the pool share, so the largest need counts.

        num_parameters_of_layer: of the largest one.
        """
        as_owner, relayed = self.share_as_owner, self.share_relayed
        gathered = (as_owner + self.share_as_role + relayed) * parameter_bytes
        scattered = (as_owner + self.share_sent_by_role) * self.gradient_bytes
        scattered += relayed * FP32_BYTES
        if self.num_adapted:
            # Every rank has all of an adapter: it sends and relays that, and receives the same
            # share of each.
            most_bytes = self.num_adapted * (2 * self.gradient_bytes + (relayed > 0) * FP32_BYTES)
            return max(gathered * num_parameters_of_layer, most_bytes)
        return max(gathered, scattered) * num_parameters_of_layer


def footprint_of_scheme(
    scheme: Scheme,
    shape: ModelShape,
    num_ranks: int,
    ranks_per_node: int,
    gradient_bytes: int,
    frozen: Frozen,
) -> PoolFootprint:
    """The needs of a job that replicas of one scheme fill, in whole nodes.

    Stages have equal shares of the layers, so that a choice of layers can ask for each stage alone.
    """
    whole = replace(scheme.as_replica, layers=None, splits_cp=False, recomputes=False)
    return _footprint_of_job(whole, shape, num_ranks, ranks_per_node, gradient_bytes, frozen)


@lru_cache(_MAX_CACHED)
def _footprint_of_job(
    scheme: Scheme,
    shape: ModelShape,
    num_ranks: int,
    ranks_per_node: int,
    gradient_bytes: int,
    frozen: Frozen,
) -> PoolFootprint:
    num_replicas, num_idle = divmod(num_ranks, scheme.num_ranks)
    text = f"{num_replicas}*{scheme}" + (f"+{num_idle}*idle" if num_idle else "")
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    return PoolFootprint.of(Pool.of(strategy), shape, gradient_bytes=gradient_bytes, frozen=frozen)


def _shares(
    strategy: Strategy,
    num_atoms: int,
    shape: ModelShape,
    frozen: Frozen,
    *,
    in_fp32: bool,
) -> tuple[float, ...]:
    """(as owner, as role, sent by a role, relayed) of the largest layer, by the kind of transfer
    (`transfer.collective`), and `num_peers`; in_fp32: whether gradients travel in fp32."""
    schemes = strategy.schemes
    num_ranks, num_groups = strategy.num_ranks, math.lcm(*(scheme.ep for scheme in schemes))
    per_node = strategy.ranks_per_node
    counted = amounts_of_model(shape, num_groups, num_atoms, num_ranks, per_node, frozen)
    roles = roles_of(
        *(strategy, shape.num_layers, shape.tied_embeddings),
        *(shape.num_experts, shape.num_predictions),
    )
    amounts = StrategyAmounts(counted, roles)
    buckets = counted.layout.buckets
    largest = max(bucket.num_elements for bucket in buckets if bucket.unit.is_layer)
    kind = collective_of(amounts, may_reduce=in_fp32)
    if kind is Collective.ALL_GATHER:  # of shares, into staging and out of it
        whole = max(bucket.num_elements for bucket in buckets) / largest
        num_columns = min(strategy.ranks_per_node, max(scheme.cp for scheme in schemes))
        return whole / num_ranks, whole, whole, 0.0, num_columns - 1
    most = np.zeros(3)
    of_bucket: dict[int, npt.NDArray[np.int64]] = {}
    for same in amounts.equal_buckets:
        staged = amounts.staged(same[0], relays=kind is Collective.TWO_STEP)
        of_bucket.update({bucket.index: staged for bucket in same})
    for call in calls_of(kind, amounts, strategy):
        of_call = np.sum([of_bucket[bucket] for bucket in call], axis=0)
        most = np.maximum(most, of_call.max(axis=1))
    as_owner, part, relayed = (float(elements) / largest for elements in most)
    # A rank with one atom of each parameter has them in the order in which they travel.
    num_held = (1 if scheme.ep > 1 else scheme.tp for scheme in schemes)
    is_in_order = min(num_held) == num_atoms and kind is Collective.ALL_TO_ALL
    as_role = 0.0 if is_in_order else part
    sent = as_role if in_fp32 else part
    return as_owner, as_role, sent, relayed, strategy.ranks_per_node - 1


def _most_adapted(shape: ModelShape, lora: Lora) -> int:
    kinds = (lora.of_layer(shape, has_experts=each) for each in (False, True))
    return max(map(lora.num_in, (*kinds, lora.of_output(shape))))


def _weight_shapes(strategies: Sequence[Strategy]) -> float:
    degrees: dict[int, set[int]] = defaultdict(set)
    for strategy in strategies:
        for replica in strategy.replicas:
            for rank in replica.ranks:
                degrees[rank].add(replica.scheme.tp)
    return max(sum(1 / tp for tp in of_rank) for of_rank in degrees.values())


def num_communicators(pool: Pool) -> int:
    """Communicators of the rank with most after every group has been used; each is created at
    first use."""
    if pool.num_ranks == 1:
        return 0
    groups = dict.fromkeys(ranks for strategy in pool.strategies for ranks in strategy.rank_groups)
    replicas = (replica for strategy in pool.strategies for replica in strategy.replicas)
    of_columns = dict.fromkeys(ranks for replica in replicas for ranks in replica.column_groups)
    of_rank = Counter(rank for ranks in (*groups, *of_columns) for rank in ranks)
    return NUM_GROUPS_OF_ALL + max(of_rank.values(), default=0)
