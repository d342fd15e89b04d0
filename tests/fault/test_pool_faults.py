"""A worker that hangs, dies or raises fails only its own test, within the timeout."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo_pool import Pool, RankPool, WorkerFailure, close_pools, pool_of

pytestmark = pytest.mark.fault

NUM_RANKS = 3
TIMEOUT_S = 1.0


def sum_of_ranks() -> float:
    """A collective that needs every rank."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def process_id() -> int:
    return os.getpid()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def wait_for_a_rank_that_never_comes() -> None:
    if dist.get_rank() > 0:
        sum_of_ranks()
    else:
        time.sleep(3600)


def die_on(rank: int) -> float:
    if dist.get_rank() == rank:
        os._exit(9)
    return sum_of_ranks()


def die_quietly_on_first() -> None:
    if dist.get_rank() == 0:
        os._exit(9)


def raise_on(rank: int) -> float:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    return sum_of_ranks()


def unpicklable() -> object:
    return lambda: None


@pytest.fixture
def pool() -> Pool:
    return pool_of(NUM_RANKS)


def assert_works(pool: Pool) -> None:
    assert pool.run(sum_of_ranks) == [3.0] * NUM_RANKS


def test_workers_are_reused(pool: Pool) -> None:
    first = pool.run(process_id)
    assert len(set(first)) == NUM_RANKS
    assert pool.run(process_id) == first


def test_a_hang_of_one_rank_is_a_failure_that_names_it(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"ranks \[1\] of 3 .* within 1.0 s: a hang"):
        pool.run(sleep_on, 1, timeout_s=TIMEOUT_S)
    assert_works(pool)


def test_a_hang_in_a_collective_is_a_failure(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"ranks \[0, 1, 2\] of 3 did not finish"):
        pool.run(wait_for_a_rank_that_never_comes, timeout_s=TIMEOUT_S)
    assert_works(pool)


def test_hung_workers_are_killed(pool: Pool) -> None:
    before = pool.run(process_id)
    with pytest.raises(WorkerFailure):
        pool.run(sleep_on, 0, timeout_s=TIMEOUT_S)
    assert not any(is_alive(pid) for pid in before)
    assert not set(before) & set(pool.run(process_id))


def test_a_dead_worker_is_reported_even_if_others_wait_for_it(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"^rank 2 of 3 failed:\nthe worker died"):
        pool.run(die_on, 2)
    assert_works(pool)


def test_a_worker_that_dies_alone_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"^rank 0 of 3 failed:\nthe worker died"):
        pool.run(die_quietly_on_first)
    assert_works(pool)


def test_a_worker_that_died_between_two_runs_is_replaced(pool: Pool) -> None:
    victim = pool.run(process_id)[1]
    os.kill(victim, 9)
    # The main thread is a zombie before the other threads have ended; wait for all of them.
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
    assert_works(pool)


def test_a_worker_that_dies_before_it_reads_its_message_is_reported(pool: Pool) -> None:
    victim = pool.run(process_id)[1]
    os.kill(
        victim, signal.SIGSTOP
    )  # it is alive when the run begins, and leaves the message unread
    killer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerFailure, match=r"^rank 1 of 3 failed:\nthe worker died"):
        pool.run(sum_of_ranks)
    killer.join()
    assert_works(pool)


def test_an_exception_comes_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"(?s)rank 2 of 3 failed.*raise_on.*had enough"):
        pool.run(raise_on, 2)
    assert_works(pool)


def test_an_answer_that_cannot_be_sent_is_a_failure_not_a_hang(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match="pickle"):
        pool.run(unpicklable, timeout_s=10.0)
    assert_works(pool)


def test_closed_pools_leave_no_process_and_start_again_on_demand() -> None:
    before = pool_of(NUM_RANKS).run(process_id)
    close_pools()
    assert not any(is_alive(pid) for pid in before)
    assert_works(pool_of(NUM_RANKS))


def start_a_pool_and_wait(connection: Connection) -> None:
    pool = RankPool(2)
    connection.send(pool.run(process_id))
    pool.run(sleep_on, 1, timeout_s=3600.0)


def test_workers_end_when_their_parent_is_killed_idle_or_not() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=start_a_pool_and_wait, args=(theirs,))
    parent.start()
    workers = ours.recv()
    parent.kill()
    parent.join()
    while any(is_alive(pid) for pid in workers):  # otherwise the test times out
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """True if the process runs; one that has ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
