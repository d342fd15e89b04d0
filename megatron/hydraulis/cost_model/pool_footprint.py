"""What the pool of a job takes of the memory of a rank whatever the strategy: staging buffers and
communicators."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.device import (
    ALL_TO_ALL_BYTES,
    NCCL_COMMUNICATOR_BYTES,
    NUM_COMMUNICATORS_IN_RESERVE,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

__all__ = ["PoolFootprint", "communicators_text", "groups_of"]

NUM_GROUPS_OF_ALL = 2
"""Of all ranks: the job's, and that of regrouping."""


def groups_of(strategy: Strategy) -> list[tuple[int, ...]]:
    """Rank tuples of the tp, cp and pp groups that ``strategy`` needs, in a fixed order.

    Of a scheme that splits its cp ranks, like ``cp8~``, every group that a wave may ask for. Groups
    of one rank are left out: every rank has its own.
    """
    needed: dict[tuple[int, ...], None] = {}
    for replica in strategy.replicas:
        scheme = replica.scheme
        for stage in range(scheme.pp):
            for cp in range(scheme.cp):
                needed[replica.tp_ranks(stage, cp)] = None
            for tp in range(scheme.tp):
                columns = replica.cp_ranks(stage, tp)
                for size in (group.cp for group in scheme.group_schemes):
                    for offset in range(0, scheme.cp, size):
                        needed[columns[offset : offset + size]] = None
        for cp in range(scheme.cp):
            for tp in range(scheme.tp):
                needed[replica.pp_ranks(cp, tp)] = None
    return [ranks for ranks in needed if len(ranks) > 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFootprint:
    """Of the rank that needs most.

    Shares are of the largest bucket, which is a layer.
    """

    share_as_owner: float
    """What an owner, or a relay, sends and receives: its part, once for each rank that holds it."""
    share_as_role: float
    """What a role sends and receives through staging: its part of the layer, or nothing where it
    travels in the order in which it lies in memory, as it does with the largest tp."""
    share_relayed: float
    """What a rank relays for the others of its node, in a buffer of its own."""
    num_communicators: int
    """Of NCCL, once every strategy has been used."""

    @classmethod
    def of(cls, pool: Pool) -> "PoolFootprint":
        """Of every strategy of the pool in turn."""
        shares = [_shares_of_strategy(strategy, pool.tp_lcm) for strategy in pool.strategies]
        as_owner, as_role, relayed = (max(column) for column in zip(*shares, strict=True))
        return cls(
            share_as_owner=as_owner,
            share_as_role=as_role,
            share_relayed=relayed,
            num_communicators=_num_communicators(pool.strategies, pool.num_ranks),
        )

    @classmethod
    def of_scheme(cls, scheme: Scheme, num_ranks: int, ranks_per_node: int) -> "PoolFootprint":
        """As if replicas of one scheme filled the job."""
        of_stage = scheme.tp * scheme.cp
        in_node = min(ranks_per_node, of_stage) * max(1, ranks_per_node // scheme.num_ranks)
        as_owner, as_role, relayed = _shares(
            num_copies=max(1, num_ranks // scheme.num_ranks) * scheme.cp,
            copies_in_node=in_node / scheme.tp,
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            least_tp=scheme.tp,
            is_in_order=True,
            holds_everything=scheme.tp * scheme.pp == 1 and num_ranks % scheme.cp == 0,
        )
        has_groups = (scheme.tp > 1, scheme.pp > 1, *(g.cp > 1 for g in scheme.group_schemes))
        return cls(
            share_as_owner=as_owner,
            share_as_role=as_role,
            share_relayed=relayed,
            num_communicators=NUM_GROUPS_OF_ALL + sum(has_groups) if num_ranks > 1 else 0,
        )


def communicators_text(num_communicators: int) -> str:
    """How many communicators a rank makes, and what they are assumed to take."""
    return (
        f"a rank makes up to {num_communicators} communicators; NCCL's are assumed to take "
        f"{NCCL_COMMUNICATOR_BYTES / 1e9:g} GB each and {ALL_TO_ALL_BYTES / 1e9:g} GB for "
        f"connections within a node, {NUM_COMMUNICATORS_IN_RESERVE} of them in the reserve"
    )


def _shares_of_strategy(strategy: Strategy, num_atoms: int) -> tuple[float, float, float]:
    replicas, nodes = strategy.replicas, strategy.ranks_per_node
    copies_in_node: dict[int, float] = defaultdict(float)
    for replica in replicas:
        scheme = replica.scheme
        most: Counter[int] = Counter()
        for stage in range(scheme.pp):
            in_nodes = Counter(
                rank // nodes for cp in range(scheme.cp) for rank in replica.tp_ranks(stage, cp)
            )
            most |= in_nodes
        for node, num_ranks in most.items():
            copies_in_node[node] += num_ranks / scheme.tp
    degrees = [replica.scheme.tp for replica in replicas]
    return _shares(
        num_copies=sum(replica.scheme.cp for replica in replicas),
        copies_in_node=max(copies_in_node.values()),
        num_ranks=strategy.num_ranks,
        ranks_per_node=nodes,
        least_tp=min(degrees),
        is_in_order=min(degrees) == num_atoms,
        holds_everything=sum(r.scheme.cp for r in replicas) == strategy.num_ranks,
    )


def _shares(
    *,
    num_copies: int,
    copies_in_node: float,
    num_ranks: int,
    ranks_per_node: int,
    least_tp: int,
    is_in_order: bool,
    holds_everything: bool,
) -> tuple[float, float, float]:
    """As owner, as role, relayed, by the kind of transfer (`transfer.collective`)."""
    if holds_everything:  # an all-gather of shares, into staging and out of it
        return 1.0, 0.0, 0.0
    if num_ranks > ranks_per_node and copies_in_node > 1:  # two steps
        return copies_in_node / ranks_per_node, 1 / least_tp, 1 / ranks_per_node
    return num_copies / num_ranks, 0.0 if is_in_order else 1 / least_tp, 0.0


def _num_communicators(strategies: Sequence[Strategy], num_ranks: int) -> int:
    """A communicator is made when its group is first used: in the end each group of a rank."""
    if num_ranks == 1:
        return 0
    groups = dict.fromkeys(ranks for strategy in strategies for ranks in groups_of(strategy))
    of_rank = Counter(rank for ranks in groups for rank in ranks)
    return NUM_GROUPS_OF_ALL + max(of_rank.values(), default=0)
