"""--distributed-timeout-minutes sets the timeout of every group of a job, not only the world's."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.hydraulis.loop import entry
from megatron.hydraulis.runtime.process_groups import GroupRegistry
from megatron.hydraulis.strategy import Strategy
from tests.support.forked_job import run_job
from tests.support.gloo_pool import pool_of
from tests.support.tiny_corpus import tiny_command, write_corpus

pytestmark = pytest.mark.distributed


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a gloo group's collectives."""
    options: Any = group._get_backend(torch.device("cpu")).options
    found: timedelta = options._timeout
    return found


def timeouts_of_registry(seconds: float) -> list[timedelta]:
    """On every rank: of this rank's groups in a registry made with that timeout."""
    strategy = Strategy.parse("tp2pp2", 4)
    groups = GroupRegistry([strategy], timeout=timedelta(seconds=seconds))
    collection = groups.collection(strategy)
    assert collection is not None
    of_rank = [groups.of_self, groups.regroup, collection.tp, collection.pp]
    found = [timeout_of(group) for group in of_rank]
    for group in of_rank:
        dist.destroy_process_group(group)
    return found


def test_a_registry_gives_its_timeout_to_every_group() -> None:
    for found in pool_of(4).run(timeouts_of_registry, 23.0):
        assert found == [timedelta(seconds=23)] * 4


def test_the_option_reaches_every_group_that_a_run_creates(tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        create = dist.new_group

        def new_group(*args: Any, **kwargs: Any) -> Any:
            group: Any = create(*args, **kwargs)
            ranks = kwargs.get("ranks", args[0] if args else None)
            if ranks is None or dist.get_rank() in ranks:
                print("GROUP", kwargs.get("group_desc"), timeout_of(group).total_seconds())
            return group

        dist.new_group = new_group
        entry.main(argv)

    argv = tiny_command(
        write_corpus(tmp_path / "tiny"),
        tmp_path / "run",
        *("--strategy", "tp2", "--train-iters", "1", "--distributed-timeout-minutes", "7"),
    )
    outcome = run_job(argv, 2, tmp_path / "output", program=program)
    outcome.assert_succeeded()
    for rank in outcome.ranks.values():
        groups = [line.split() for line in rank.stdout.splitlines() if line.startswith("GROUP")]
        ours = {name: float(seconds) for _, name, seconds in groups if "hydraulis" in name}
        names = ("hydraulis_loop", "hydraulis_self", "hydraulis_regroup", "hydraulis")
        assert ours == dict.fromkeys(names, 420)
