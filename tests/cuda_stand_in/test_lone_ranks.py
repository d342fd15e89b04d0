"""Ranks without peers: their results, their logs, their failures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda_stand_in.device import mark
from tests.cuda_stand_in.lone_ranks import log_of, run_alone
from tests.cuda_stand_in.order import check_order, read_log
from tests.support.gloo_pool import WorkerFailure

GIB = 2**30


def exchange(num_elements: int) -> tuple[int, int, float]:
    """A lone rank calls a few collectives; returns its device, the device's memory, a sum from
    there."""
    group: Any = dist.new_group([0, 2])
    values = torch.ones(num_elements, device="cuda")
    mark("exchange")
    dist.all_reduce(values)
    if dist.get_rank() != 1:
        dist.all_reduce(values, group=group)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return torch.cuda.current_device(), total_bytes, float(values.sum())


def fail_on_rank(rank: int) -> None:
    """One of the lone ranks raises."""
    if dist.get_rank() == rank:
        raise ValueError("on purpose")


def test_each_runs_as_a_rank_of_the_job(tmp_path: Path) -> None:
    found = run_alone(exchange, 8, num_ranks=3, logs=tmp_path, STAND_IN_MEMORY_BYTES=4 * GIB)
    assert found == [(rank, 4 * GIB, 0.0) for rank in range(3)]
    logs = [read_log(log_of(tmp_path, rank)) for rank in range(3)]
    report = check_order(logs)
    assert report.mismatches == report.cycle == ()
    assert [log.operations[-1].phase for log in logs] == ["exchange"] * 3
    shapes = {frozenset(log.sizes.items()) for log in logs}
    assert len(shapes) == 2, "ids of communicators differ, their names are the same on all ranks"


def test_some_ranks_of_a_larger_job() -> None:
    assert [found[0] for found in run_alone(exchange, 8, num_ranks=64, ranks=(1, 62))] == [1, 6]


def test_the_first_failure_is_reported() -> None:
    with pytest.raises(WorkerFailure, match=r"(?s)rank 1 failed:.*ValueError: on purpose"):
        run_alone(fail_on_rank, 1, num_ranks=2)
    with pytest.raises(WorkerFailure, match=r"rank \d took more than 1 s"):
        run_alone(time.sleep, 30, num_ranks=2, timeout_s=1)
