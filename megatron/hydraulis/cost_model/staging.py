"""Staging buffers of parameters and gradients in transit, and communicators, on a rank.

Staging has two slots, each with a send and a receive buffer for the bucket that needs most: a layer
with experts, one without, or a part of the embedding. An owner sends parameters and receives
gradients, one copy of its share for each holder; a role receives and sends in the arena itself or,
if order or dtype of travel differ, its part of the bucket. If transfers are relayed inside a node,
a third buffer holds what passes through.

**Copies of a share.** In canonical order a layer has consecutive *parts* with different numbers of
holders: what tp cuts before the experts (attention), the experts in the order of their numbers,
what tp cuts after them (shared experts), and what every tp rank holds whole (norms, routers,
projections to latents). A share is 1/num_ranks of the layer, so that of rank 0 may be all
attention. With c(x) holders of the element at x in [0, 1], the owner of share s sends the integral
of c(x) over the share, s/num_ranks to (s + 1)/num_ranks. Over relays, the relay of index i in a
node sends those of the shares i, i + ranks_per_node, i + 2·ranks_per_node, …, with the holders c(x)
in its node. The rank that sends most counts. Rounding of shares to whole rows and other orders of
the owners (`best_owner_orders`) are neglected.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.transfer.canonical import DEFAULT_BUCKET_CAP_ELEMENTS
from megatron.hydraulis.transfer.collective import LEAST_SAVING_ACROSS

NUM_STAGING_SLOTS = 2
"""Slots of the runtime: one bucket is copied while the next one travels."""
NUM_GRADIENT_SLOTS = 2
"""Layers whose shared gradients are whole at a time: one is scattered while another computes."""
NUM_GROUPS_OF_ALL = 2
"""Groups of all ranks: the job's and that of regrouping."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFootprint:
    """Staging buffers and communicators that a job's pool needs, on the rank that needs most.

    Shares are of the largest layer.
    """

    share_as_owner: float
    """What an owner or relay sends and receives: its part, once for each rank that holds it."""
    share_as_role: float
    """What a role receives through staging: its part of a bucket, or nothing if it travels in the
    order in which it lies in memory, as with the largest tp."""
    share_sent_by_role: float
    """The same, or its part in any order if gradients travel in bf16."""
    share_relayed: float
    """What a rank relays for the others of its node, in a separate buffer."""
    weight_shapes: float
    """The rank's parts of a layer's matrices, one for each tp degree that it has: 1/tp in sum."""
    num_communicators: int
    """NCCL communicators once every strategy has been used."""
    gradient_bytes: int = FP32_BYTES
    """Size of a gradient on the wire."""

    @classmethod
    def of(
        cls, pool: Pool, shape: ModelShape | None = None, *, gradient_bytes: int = FP32_BYTES
    ) -> "PoolFootprint":
        """The largest needs of all strategies of a pool.

        shape: of the model; None if all its ranks of a tp degree hold equal shares of a layer.
        """
        in_fp32 = gradient_bytes == FP32_BYTES
        shares = [
            _shares(strategy, pool.tp_lcm, shape, in_fp32=in_fp32) for strategy in pool.strategies
        ]
        as_owner, as_role, sent, relayed = (max(column) for column in zip(*shares, strict=True))
        return cls(
            share_as_owner=as_owner,
            share_as_role=as_role,
            share_sent_by_role=sent,
            share_relayed=relayed,
            weight_shapes=_weight_shapes(pool.strategies),
            num_communicators=_num_communicators(pool.strategies, pool.num_ranks),
            gradient_bytes=gradient_bytes,
        )

    def staging_bytes(self, num_parameters_of_layer: int, parameter_bytes: int) -> float:
        """All slots. All strategies of the pool share them, so the largest need counts.

        num_parameters_of_layer: of the largest one.
        """
        as_owner, num_bytes = self.share_as_owner, self.gradient_bytes
        sent = max(as_owner * parameter_bytes, self.share_sent_by_role * num_bytes)
        received = max(as_owner * num_bytes, self.share_as_role * parameter_bytes)
        relayed = self.share_relayed * FP32_BYTES
        return NUM_STAGING_SLOTS * (sent + received + relayed) * num_parameters_of_layer


@lru_cache
def footprint_of_scheme(
    scheme: Scheme, shape: ModelShape, num_ranks: int, ranks_per_node: int
) -> PoolFootprint:
    """The needs of a job that replicas of one scheme fill, in whole nodes."""
    scheme = scheme.as_replica
    num_replicas, num_idle = divmod(num_ranks, scheme.num_ranks)
    text = f"{num_replicas}*{scheme}" + (f"+{num_idle}*idle" if num_idle else "")
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    return PoolFootprint.of(Pool.of(strategy), shape)


def _layer_parts(shape: ModelShape | None, num_groups: int) -> list[tuple[int, _Floats]]:
    """Number of layers of each kind, and parameters of their parts, (num_groups + 3,): what tp cuts
    before the experts, groups of experts, what tp cuts after them, what it leaves whole.

    num_groups: a multiple of the ep degrees in use.
    """
    if shape is None:
        return [(1, np.array([1.0, *[0.0] * (num_groups + 2)]))]
    num_whole = shape.num_whole_attention_entries
    before, whole = shape.num_attention_entries - num_whole, num_whole + 2 * shape.hidden_size
    routed, router = shape.num_routed_entries, shape.num_router_entries
    shared = shape.num_expert_entries - routed - router
    kinds = [
        (shape.num_layers - shape.num_expert_layers, 0.0, shape.num_mlp_entries, whole),
        (shape.num_expert_layers, routed / num_groups, shared, whole + router),
    ]
    return [
        (number, np.array([before, *[in_group] * num_groups, *others]))
        for number, in_group, *others in kinds
        if number
    ]


def _bucket_parts(shape: ModelShape | None, num_groups: int) -> list[_Floats]:
    """Parts of each kind of bucket, as `_layer_parts`, in fractions of the largest layer."""
    buckets = [parts for _, parts in _layer_parts(shape, num_groups)]
    largest = max(parts.sum() for parts in buckets)
    if shape is not None:  # tp cuts the embedding like attention
        num_embedding = shape.num_embedding_parameters
        num_buckets = math.ceil(num_embedding / DEFAULT_BUCKET_CAP_ELEMENTS)
        buckets.append(np.array([num_embedding / num_buckets, *[0.0] * (num_groups + 2)]))
    return [parts / largest for parts in buckets]


def _held_fractions(scheme: Scheme, ep_rank: int, num_groups: int) -> _Floats:
    """What a rank holds of each part; of a part that cp ranks share, where in it is neglected."""
    held = np.full(num_groups + 3, 1 / (scheme.tp * scheme.fs))
    held[-1] = 1 / scheme.fs
    if scheme.ep > 1:
        in_each = num_groups // scheme.ep
        held[1:-2] = 0.0
        held[1 + ep_rank * in_each : 1 + (ep_rank + 1) * in_each] = 1 / scheme.fs_of_experts
    return held


def _copies_of_shares(copies: _Floats, sizes: _Floats, num_ranks: int) -> _Floats:
    """The integral of copies over each rank's share: shape (num_ranks,).

    Args:
        copies: holders of each part.
        sizes: of the parts.
        num_ranks: owners.
    """
    present = sizes > 0
    ends, below = (
        np.concatenate([[0.0], np.cumsum(of_parts[present])])
        for of_parts in (sizes, copies * sizes)
    )
    borders = np.linspace(0.0, ends[-1], num_ranks + 1)
    return np.diff(np.interp(borders, ends, below))


def _shares(
    strategy: Strategy, num_atoms: int, shape: ModelShape | None, *, in_fp32: bool
) -> tuple[float, ...]:
    """(as owner, as role, sent by a role, relayed), by the kind of transfer
    (`transfer.collective`); in_fp32: whether gradients travel in fp32."""
    num_ranks, ranks_per_node = strategy.num_ranks, strategy.ranks_per_node
    schemes = [replica.scheme for replica in strategy.replicas]
    is_everywhere = all(s.tp == s.pp == s.ep == s.fs == 1 for s in schemes)
    num_groups = math.lcm(*(scheme.ep for scheme in schemes))
    buckets = _bucket_parts(shape, num_groups)
    largest = max(float(sizes.sum()) for sizes in buckets)
    if is_everywhere and sum(scheme.cp for scheme in schemes) == num_ranks and in_fp32:
        return largest, 0.0, 0.0, 0.0  # an all-gather of shares, into staging and out of it
    held = {
        scheme: [_held_fractions(scheme, ep_rank, num_groups) for ep_rank in range(scheme.ep)]
        for scheme in strategy.schemes
    }
    part = max(
        float(of_rank @ sizes) for ranks in held.values() for of_rank in ranks for sizes in buckets
    )
    # Of a layer, which is in one stage of each replica; in a node in the stage with most there.
    copies = np.zeros(num_groups + 3)
    in_nodes = np.zeros((num_ranks // ranks_per_node, num_groups + 3))
    for replica in strategy.replicas:
        scheme = replica.scheme
        of_stage = scheme.tp * scheme.cp
        of_stages = np.zeros((scheme.pp, *in_nodes.shape))
        for place, rank in enumerate(replica.ranks):
            stage, in_stage = divmod(place, of_stage)
            of_stages[stage, rank // ranks_per_node] += held[scheme][in_stage % scheme.ep]
        copies += of_stages[0].sum(axis=0)
        in_nodes += of_stages.max(axis=0)
    if num_ranks > ranks_per_node and _relays(in_nodes, shape, num_groups):
        index = np.arange(num_ranks) % ranks_per_node
        most = max(
            np.bincount(index, _copies_of_shares(of_node, sizes, num_ranks)).max()
            for of_node in np.unique(in_nodes, axis=0)
            for sizes in buckets
        )
        return float(most), part, part, largest / ranks_per_node
    # A rank with one atom of each parameter has them in the order in which they travel.
    num_held = (1 if scheme.ep > 1 else scheme.tp for scheme in schemes)
    as_role = 0.0 if min(num_held) == num_atoms else part
    most = max(_copies_of_shares(copies, sizes, num_ranks).max() for sizes in buckets)
    return float(most), as_role, as_role if in_fp32 else part, 0.0


def _relays(in_nodes: _Floats, shape: ModelShape | None, num_groups: int) -> bool:
    """Whether transfers of the whole model are relayed, by the rule of
    `transfer.collective.collective_of`.

    in_nodes: copies of each part in each node, shape (num_nodes, num_groups + 3).
    """
    of_model = np.sum([number * parts for number, parts in _layer_parts(shape, num_groups)], axis=0)
    if shape is not None:  # tp cuts embedding and output like attention
        of_model[0] += shape.num_parameters - of_model.sum()
    in_one_step = (in_nodes @ of_model).sum()
    in_two_steps = (np.minimum(in_nodes, 1.0) @ of_model).sum()
    return bool(in_one_step - in_two_steps >= LEAST_SAVING_ACROSS * in_one_step)


def _weight_shapes(strategies: Sequence[Strategy]) -> float:
    degrees: dict[int, set[int]] = defaultdict(set)
    for strategy in strategies:
        for replica in strategy.replicas:
            for rank in replica.ranks:
                degrees[rank].add(replica.scheme.tp)
    return max(sum(1 / tp for tp in of_rank) for of_rank in degrees.values())


def _num_communicators(strategies: Sequence[Strategy], num_ranks: int) -> int:
    """Communicators of a rank after every group has been used; each is created at first use."""
    if num_ranks == 1:
        return 0
    groups = dict.fromkeys(ranks for strategy in strategies for ranks in strategy.rank_groups)
    replicas = (replica for strategy in strategies for replica in strategy.replicas)
    of_columns = dict.fromkeys(ranks for replica in replicas for ranks in replica.column_groups)
    of_rank = Counter(rank for ranks in (*groups, *of_columns) for rank in ranks)
    return NUM_GROUPS_OF_ALL + max(of_rank.values(), default=0)
