import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron.hydraulis.data.workers import OrderedWorkers
from megatron.hydraulis.errors import DataError


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_inputs", [0, 1, 2, 5, 50])
def test_results_come_in_the_order_of_the_inputs(num_workers: int, num_inputs: int) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0.0)
        return square(number)

    with OrderedWorkers(slow_first, num_workers) as workers:
        assert list(workers.map(range(num_inputs))) == [n * n for n in range(num_inputs)]


def test_work_is_done_in_other_processes() -> None:
    with OrderedWorkers[int, int](lambda _: os.getpid(), 2) as workers:
        pids = set(workers.map(range(8)))
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_inputs_are_not_taken_far_ahead() -> None:
    taken = []

    def inputs() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    with OrderedWorkers(square, 2) as workers:
        results = workers.map(inputs())
        assert next(results) == 0
        assert len(taken) <= 5


def test_large_inputs_and_results_do_not_block_each_other() -> None:
    size = 4_000_000
    with OrderedWorkers[bytes, bytes](lambda content: content + b"!", 2) as workers:
        sizes = [len(result) for result in workers.map(bytes(size) for _ in range(8))]
    assert sizes == [size + 1] * 8


@pytest.mark.parametrize("num_workers", [1, 2])
def test_first_error_in_order_is_raised(num_workers: int) -> None:
    def refuse_from_three(number: int) -> int:
        if number >= 3:
            raise DataError(f"refused {number}")
        return number

    results: list[int] = []
    with (
        OrderedWorkers(refuse_from_three, num_workers) as workers,
        pytest.raises(DataError, match="refused 3"),
    ):
        results.extend(workers.map(range(20)))
    assert results == [0, 1, 2]


def test_death_of_a_worker_is_an_error_not_a_hang() -> None:
    def die_at_five(number: int) -> int:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with (
        OrderedWorkers(die_at_five, 2) as workers,
        pytest.raises(DataError, match="worker 1 of 2 ended with exit code -9"),
    ):
        list(workers.map(range(1000)))


def test_no_process_is_left() -> None:
    with OrderedWorkers(square, 3) as workers:
        list(workers.map(range(9)))
        processes = list(workers._processes)
    assert [process.exitcode for process in processes] == [0, 0, 0]
