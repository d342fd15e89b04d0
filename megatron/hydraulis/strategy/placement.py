"""Default placement: which ranks serve a replica without ``@``.

Replicas are placed by descending tp, then descending cp, then in the order of the text. A stage
goes to the first node with room for all its tp·cp ranks; otherwise each of its tensor-parallel
groups goes to the first node with room for it, or, if there is none, to the nodes with the most
free ranks. Stages are placed in order, so a pipeline may cross nodes. Ranks named after ``@`` are
not available.
"""

import itertools
from collections.abc import Sequence

from megatron.hydraulis.strategy.scheme import Scheme


class _FreeRanks:
    """The free ranks of each node that has some, in ascending order."""

    def __init__(self, ranks: Sequence[int], ranks_per_node: int) -> None:
        of_nodes = itertools.groupby(sorted(ranks), lambda rank: rank // ranks_per_node)
        self._nodes = [list(of_node) for _, of_node in of_nodes]

    def take_in_one_node(self, num_ranks: int) -> list[int] | None:
        for node in self._nodes:
            if len(node) >= num_ranks:
                return self._take(node, num_ranks)
        return None

    def take_across_nodes(self, num_ranks: int) -> list[int]:
        taken: list[int] = []
        for node in sorted(self._nodes, key=len, reverse=True):
            taken += self._take(node, min(len(node), num_ranks - len(taken)))
        return sorted(taken)

    def _take(self, node: list[int], num_ranks: int) -> list[int]:
        taken = node[:num_ranks]
        del node[:num_ranks]
        if not node:
            self._nodes.remove(node)
        return taken


def place(
    schemes: Sequence[Scheme],
    free_ranks: Sequence[int],
    ranks_per_node: int,
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each scheme's replica, in the order of schemes and in Replica's rank order.

    Raises ValueError if the schemes need more ranks than are free.
    """
    if sum(scheme.num_ranks for scheme in schemes) > len(free_ranks):
        raise ValueError("more ranks needed than free")
    free = _FreeRanks(free_ranks, ranks_per_node)
    placed: dict[int, tuple[int, ...]] = {}
    by_size = sorted(range(len(schemes)), key=lambda i: (-schemes[i].tp, -schemes[i].cp))
    for index in by_size:
        scheme = schemes[index]
        ranks: list[int] = []
        for _ in range(scheme.pp):
            ranks += _place_stage(scheme, free)
        placed[index] = tuple(ranks)
    return tuple(placed[index] for index in range(len(schemes)))


def _place_stage(scheme: Scheme, free: _FreeRanks) -> list[int]:
    whole = free.take_in_one_node(scheme.tp * scheme.cp)
    if whole is not None:
        return whole
    ranks: list[int] = []
    for _ in range(scheme.cp):
        group = free.take_in_one_node(scheme.tp)
        ranks += free.take_across_nodes(scheme.tp) if group is None else group
    return ranks
