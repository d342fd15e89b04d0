"""The machines of a job: nodes, ranks per node, and the links inside and between nodes."""

from dataclasses import dataclass, replace
from typing import Annotated

from megatron.hydraulis.assumed import Assumed, Corner, at_corner
from megatron.hydraulis.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Bandwidth and latency of one rank, in one direction while the other is used as well.

    Raises ConfigurationError unless the bandwidth is positive and the latency not negative.
    """

    bytes_per_s: float
    latency_s: Annotated[
        float, Assumed(0.5, 2.0, "nccl-tests show 3 to 10 µs in a node, 5 to 20 µs across nodes")
    ]
    """Time of an empty message."""
    source: str
    """The origin of the two numbers, with its date."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0 or not self.latency_s >= 0.0:
            raise ConfigurationError(
                f"link from {self.source!r}: bandwidth must be positive and latency not negative "
                f"but they are {self.bytes_per_s} bytes/s and {self.latency_s} s; correct them"
            )

    def time_s(self, num_bytes: float) -> float:
        """Time of one message: latency plus bytes over bandwidth."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes with the same number of ranks; ranks are numbered node by node.

    Raises ConfigurationError for a cluster without nodes or ranks, or with smaller domains than
    nodes.
    """

    num_nodes: int
    ranks_per_node: int
    ranks_per_domain: int = 0
    """Ranks that links of the kind inside a node connect; 0: those of a node. On GB200 NVL72 they
    are 72 in 18 nodes."""
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigurationError(
                f"cluster: needs at least 1 node of 1 rank but has {self.num_nodes} nodes of "
                f"{self.ranks_per_node} ranks; give positive numbers"
            )
        if self.ranks_per_domain and self.ranks_per_domain < self.ranks_per_node:
            raise ConfigurationError(
                f"cluster: links inside nodes connect {self.ranks_per_domain} ranks, fewer than a "
                f"node's {self.ranks_per_node}; give at least as many"
            )

    def at_corner(self, corner: Corner) -> "Cluster":
        """The cluster with assumed constants of its links in a corner."""
        return replace(
            self,
            intra_node=at_corner(self.intra_node, corner),
            inter_node=at_corner(self.inter_node, corner),
        )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def linked_ranks(self) -> int:
        """Ranks that links of the kind inside a node connect."""
        return max(self.ranks_per_node, self.ranks_per_domain)

    def uses_network(self, num_ranks: int) -> bool:
        """True if a group of num_ranks neighbouring ranks is too large for the links inside nodes.

        Ranks of a domain are numbered one after the other, and groups are assumed not to lie across
        its end, as where 64 of 72 GPUs are used.
        """
        return num_ranks > self.linked_ranks

    def point_to_point(self, num_ranks: int) -> Link:
        """The slowest link between two neighbours in a group of num_ranks neighbouring ranks."""
        return self.inter_node if self.uses_network(num_ranks) else self.intra_node

    def collective(self, num_ranks: int, stride: int = 1) -> Link:
        """The link that bounds ring collectives over num_ranks neighbouring ranks, or over every
        stride-th of them.

        A ring over several nodes, or domains, leaves each through all of the group's ranks there,
        so their network links add up, at most to the bandwidth inside a node.
        """
        if not self.uses_network(num_ranks):
            return self.intra_node
        together = self.inter_node.bytes_per_s * max(1, self.linked_ranks // stride)
        return replace(self.inter_node, bytes_per_s=min(together, self.intra_node.bytes_per_s))
