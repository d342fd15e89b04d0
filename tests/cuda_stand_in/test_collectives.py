"""NCCL on the stand-in: what its calls move between processes, what they reject, what hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda_stand_in.pool import run_logged
from tests.support.gloo_pool import WorkerFailure, pool_of

NUM_RANKS = 3
SMALL = 13
LARGE = 200_001
"""Elements: several chunks, the last of them not full."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small integers on the CPU, whose sums every type represents exactly."""
    return ((torch.arange(size) * (rank + 2)) % 11).to(dtype)


def wrong_results(size: int, dtype: torch.dtype) -> list[str]:
    """Run on every rank; the collectives with a wrong result."""
    rank, wrong = dist.get_rank(), []
    parts = [values(r, size, dtype) for r in range(NUM_RANKS)]
    total = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
    own = parts[rank].cuda()

    def expect(name: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found.cpu(), expected):
            wrong.append(name)

    for name, operation, expected in [
        ("sum", dist.ReduceOp.SUM, total),
        ("max", dist.ReduceOp.MAX, torch.stack(parts).amax(0)),
        ("min", dist.ReduceOp.MIN, torch.stack(parts).amin(0)),
    ]:
        reduced = own.clone()
        dist.all_reduce(reduced, op=operation)
        expect(name, reduced, expected)
    if dtype.is_floating_point:
        mean = own.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        wide = torch.promote_types(dtype, torch.float32)
        expect("mean", mean, (total.to(wide) / NUM_RANKS).to(dtype))
    gathered = own.new_empty(NUM_RANKS * size)
    dist.all_gather_into_tensor(gathered, own)
    expect("all-gather", gathered, torch.cat(parts))
    listed = [torch.empty_like(own) for _ in range(NUM_RANKS)]
    dist.all_gather(listed, own)
    expect("all-gather of a list", torch.cat(listed), torch.cat(parts))
    scattered = torch.empty_like(own)
    dist.reduce_scatter_tensor(scattered, torch.cat(parts).roll(rank).cuda())
    rolled = [torch.cat(parts).double().roll(r) for r in range(NUM_RANKS)]
    expected = torch.stack(rolled).sum(0).to(dtype)[rank * size : (rank + 1) * size]
    expect("reduce-scatter", scattered, expected)
    received = own.clone()
    dist.broadcast(received, src=1)
    expect("broadcast", received, parts[1])
    onto = own.clone()
    dist.reduce(onto, dst=2)
    expect("reduce", onto, total if rank == 2 else parts[rank])
    # Rank r sends r + s elements to rank s.
    counts = [[r + s for s in range(NUM_RANKS)] for r in range(NUM_RANKS)]
    sent = own[: sum(counts[rank])]
    takes = [row[rank] for row in counts]
    taken = own.new_empty(sum(takes))
    dist.all_to_all_single(taken, sent, takes, counts[rank])
    pieces = [parts[r][: sum(counts[r])].split(counts[r])[rank] for r in range(NUM_RANKS)]
    expect("uneven all-to-all", taken, torch.cat(pieces))
    even = own.new_empty(NUM_RANKS)
    dist.all_to_all_single(even, own[:NUM_RANKS].contiguous())
    expect("even all-to-all", even, torch.stack([part[rank] for part in parts]))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_the_right_results(dtype: torch.dtype) -> None:
    assert pool_of(NUM_RANKS, "cuda").run(wrong_results, SMALL, dtype) == [[]] * NUM_RANKS


def test_large_collectives_are_cut_into_chunks() -> None:
    found = pool_of(NUM_RANKS, "cuda").run(wrong_results, LARGE, torch.float32)
    assert found == [[]] * NUM_RANKS


def around_a_ring() -> bool:
    """Run on every rank: send a large and a small message to the neighbour, in one group."""
    rank = dist.get_rank()
    after, before = (rank + 1) % NUM_RANKS, (rank - 1) % NUM_RANKS
    given = [values(rank, size, torch.float32).cuda() for size in (LARGE, 5)]
    taken = [torch.empty_like(x) for x in given]
    operations = [dist.P2POp(dist.isend, x, after) for x in given]
    operations += [dist.P2POp(dist.irecv, x, before) for x in taken]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expected = [values(before, size, torch.float32) for size in (LARGE, 5)]
    return all(torch.equal(x.cpu(), y) for x, y in zip(taken, expected, strict=True))


def test_all_messages_of_a_group_are_in_flight_at_once() -> None:
    assert pool_of(NUM_RANKS, "cuda").run(around_a_ring) == [True] * NUM_RANKS


def turned_round() -> list[int]:
    """Run on every rank: groups whose ranks are not sorted, and a rank outside."""
    group = dist.new_group([2, 0], sort_ranks=False)
    if not isinstance(group, dist.ProcessGroup):  # outside
        return []
    gathered = torch.empty(2, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank()]).cuda(), group=group)
    return [int(x) for x in gathered.tolist()]


def test_groups_keep_their_order() -> None:
    assert pool_of(NUM_RANKS, "cuda").run(turned_round) == [[2, 0], [], [2, 0]]


def differ() -> None:
    """Run on every rank: one of them reduces another number of elements."""
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 1), device="cuda"))


def hang(first: int) -> None:
    """Run on every rank: two ranks wait for each other's second call."""
    os.environ["STAND_IN_TIMEOUT_S"] = "1"
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == first else groups[::-1]:
        if isinstance(group, dist.ProcessGroup):
            dist.all_reduce(torch.ones(4, device="cuda"), group=group)


def send_alone() -> None:
    """Rank 0 sends a message that no rank receives: it is not sent."""
    os.environ["STAND_IN_TIMEOUT_S"] = "1"
    warm_up = torch.ones(1, device="cuda")
    dist.all_reduce(warm_up)
    if dist.get_rank() == 0:
        work = dist.batch_isend_irecv([dist.P2POp(dist.isend, warm_up, 1)])
        work[0].wait()


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (differ, (), "calls AllReduce of 4 elements of dtype 7, reduction 0 but rank"),
        (hang, (0,), "has waited 1 s in"),
        (send_alone, (), r"hang: rank 0 .* has waited 1 s in a group of Send"),
    ],
    ids=["calls that differ", "orders that cross", "a message that no rank receives"],
)
def test_a_job_that_would_hang_fails(function: Any, args: Any, message: str) -> None:
    with pytest.raises(WorkerFailure, match=message):
        pool_of(NUM_RANKS, "cuda").run(function, *args, timeout_s=20.0)


def one_sum() -> None:
    """Every rank takes part in one sum."""
    dist.all_reduce(torch.ones(4, device="cuda"))


def test_a_log_of_a_run_names_its_communicators(tmp_path: Path) -> None:
    pool = pool_of(NUM_RANKS, "cuda")
    pool.run(one_sum)  # makes the communicator, before there is a log
    pool.run(run_logged, tmp_path, one_sum)
    for rank in range(NUM_RANKS):
        lines = (tmp_path / f"rank{rank}.log").read_text().splitlines()
        communicators = {words[2]: words for line in lines if (words := line.split())[1] == "COMM"}
        sums = [words for line in lines if (words := line.split())[1:3] == ["NCCL", "AllReduce"]]
        assert len(sums) == 1
        assert sums[0][5:9] == ["count", "4", "dtype", "7"]
        number = sums[0][4]
        assert communicators[number][5:] == ["size", str(NUM_RANKS), "rank", str(rank)]
