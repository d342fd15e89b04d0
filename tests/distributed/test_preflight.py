"""`hydraulis preflight` on forked ranks that pose as ranks of several nodes."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.loop import preflight as command
from tests.support.forked_job import JobOutcome, run_job

pytestmark = pytest.mark.distributed

RANKS_PER_NODE = 2
SLOW_S = 0.4
"""Far more than an exchange of 64 KiB takes, even on a busy machine."""


def replace(owner: object, name: str, value: Any) -> None:
    """In a forked rank, which ends with the test."""
    setattr(owner, name, value)


def preflight(folder: Path, num_ranks: int, change: Callable[[int], None]) -> JobOutcome:
    """Run it on two ranks a node; ``change(rank)`` is called on each rank first."""

    def program(argv: Sequence[str] | None) -> None:
        rank = int(os.environ["RANK"])
        torch.set_num_threads(1)
        replace(socket, "gethostname", lambda: f"node{rank // RANKS_PER_NODE}")
        change(rank)
        sys.exit(main(["preflight", "--timeout", "50"]))

    return run_job([], num_ranks, folder, program=program, ends_others=False)


def test_equal_ranks_pass_and_every_pair_of_neighbours_is_measured(
    tmp_path: Path,
) -> None:
    outcome = preflight(tmp_path, 4, lambda rank: None)
    outcome.assert_succeeded()
    assert "preflight: 4 ranks on 2 hosts (node0: 2, node1: 2), cpu" in outcome.stdout
    assert "preflight: exchange between node0 and node1, " in outcome.stdout


def test_a_slow_node_is_named_by_its_two_slow_links(tmp_path: Path) -> None:
    def slow_node_2(rank: int) -> None:
        exchange = command._exchange

        def slowed(*arguments: Any) -> None:
            if rank // RANKS_PER_NODE == 2:
                time.sleep(SLOW_S)
            exchange(*arguments)

        replace(command, "_exchange", slowed)
        replace(command, "NUM_BYTES_PER_RANK", 2**16)

    outcome = preflight(tmp_path, 12, slow_node_2)
    assert set(outcome.statuses) == {2}
    assert "check the network cards and cables of node2 and" in outcome.stderr
    for pair in ("node1 and node2", "node2 and node3"):
        assert pair in outcome.stderr


@pytest.mark.parametrize("what", ["megatron_core", "driver"])
def test_a_node_with_another_version_is_named(tmp_path: Path, what: str) -> None:
    def older_on_rank_3(rank: int) -> None:
        version = importlib.metadata.version
        is_odd = rank == 3
        if what == "driver":
            replace(command, "installed_driver", lambda: "570.1" if is_odd else "580.65")
            replace(command, "driver_problem", lambda *args, **more: None)
        elif is_odd:
            replace(
                importlib.metadata,
                "version",
                lambda name: "0.18.0" if name == "megatron-core" else version(name),
            )

    outcome = preflight(tmp_path, 4, older_on_rank_3)
    assert outcome.statuses[0] == 2  # others may lose the store of rank 0 before they compare
    assert f"all ranks need the same {what} but 3 of 4 have" in outcome.stderr
    assert "rank 3 on node1 has" in outcome.stderr
