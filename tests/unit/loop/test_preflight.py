"""What the pre-flight concludes of drivers, speeds and nodes."""

from pathlib import Path

import pytest

from megatron.hydraulis.loop.preflight import (
    driver_problem,
    installed_driver,
    pairs_of_nodes,
    slow_ranks,
)


@pytest.mark.parametrize(
    ("driver", "cuda", "is_available", "says"),
    [
        ("570.86.15", "13.0", False, "needs driver 580 or newer for CUDA 13.0 but this node has"),
        ("520.61", "12.8", False, "needs driver 525 or newer"),
        ("580.65.06", "13.0", False, "torch finds no GPU; see nvidia-smi"),
        ("580.65.06", None, False, "torch is built without CUDA"),
        ("600.1", "14.0", False, "torch finds no GPU"),
        ("570.86.15", "13.0", True, None),  # with a forward-compatibility package
        (None, "13.0", False, None),
    ],
)
def test_a_node_whose_gpus_torch_cannot_use(
    driver: str | None, cuda: str | None, is_available: bool, says: str | None
) -> None:
    problem = driver_problem(driver, cuda, is_available=is_available)
    assert problem is None if says is None else problem is not None and says in problem


def test_the_driver_is_read_from_its_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert installed_driver(path) is None
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    ):
        path.write_text(text)
        assert installed_driver(path) == "570.86.15"
    path.write_text("something else")
    assert installed_driver(path) is None


def test_a_rank_at_less_than_half_the_speed_of_the_median_is_slow() -> None:
    assert slow_ranks([1.0, 1.1, 0.9, 1.9]) == []
    assert slow_ranks([1.0, 3.0, 1.0, 2.5, 1.0]) == [1, 3]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 9])
def test_nodes_meet_their_neighbours_in_disjoint_pairs(num_nodes: int) -> None:
    rounds = pairs_of_nodes(num_nodes)
    assert len(rounds) == 2
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (node, node + 1) for node in range(num_nodes - 1)
    ]
