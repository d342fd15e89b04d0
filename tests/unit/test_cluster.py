"""Clusters and links."""

import pytest

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.errors import ConfigurationError

FAST = Link(bytes_per_s=300e9, latency_s=5e-6, source="test")
SLOW = Link(bytes_per_s=25e9, latency_s=1e-5, source="test")


def cluster(ranks_per_node: int = 8) -> Cluster:
    return Cluster(num_nodes=2, ranks_per_node=ranks_per_node, intra_node=FAST, inter_node=SLOW)


def test_ranks_of_all_nodes() -> None:
    assert cluster().num_ranks == 16


def test_groups_inside_a_node_use_its_links() -> None:
    assert cluster().collective(8) == FAST
    assert cluster().point_to_point(8) == FAST
    assert cluster().point_to_point(9) == SLOW


def test_collectives_across_nodes_add_up_the_network_links_of_a_node() -> None:
    assert cluster().collective(16).bytes_per_s == 8 * 25e9
    assert cluster().collective(16).latency_s == 1e-5
    # Sixteen adapters exceed what the ranks have among one another.
    assert cluster(16).collective(32).bytes_per_s == 300e9


def test_a_domain_of_several_nodes_uses_the_links_inside_them() -> None:
    rack = Cluster(
        num_nodes=36, ranks_per_node=4, ranks_per_domain=72, intra_node=FAST, inter_node=SLOW
    )
    assert rack.point_to_point(72) == rack.collective(72) == FAST
    assert rack.point_to_point(73) == SLOW
    assert rack.uses_network(144)
    assert not rack.uses_network(8)
    with pytest.raises(ConfigurationError, match=r"connect 4 ranks, fewer than .* 8"):
        Cluster(num_nodes=1, ranks_per_node=8, ranks_per_domain=4, intra_node=FAST, inter_node=SLOW)


def test_time_of_a_message() -> None:
    assert SLOW.time_s(25e6) == pytest.approx(1e-5 + 1e-3)


def test_impossible_clusters() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth must be positive"):
        Link(bytes_per_s=0.0, latency_s=0.0, source="test")
    with pytest.raises(ConfigurationError, match="0 nodes of 8 ranks"):
        Cluster(num_nodes=0, ranks_per_node=8, intra_node=FAST, inter_node=SLOW)
