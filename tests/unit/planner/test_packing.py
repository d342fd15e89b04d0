"""Packing of one replica: the hard limit where work and tokens pull apart, order, count."""

import math

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.greedy import pack, useful_num_micro_batches


def test_the_limit_holds_where_the_least_work_has_the_most_tokens() -> None:
    # Attention alone costs time: forty short sequences are less work than one long one and would
    # all go to the other micro-batches if tokens were not counted.
    lengths = [100] * 2 + [10] * 40
    cost = SchemeCost(Coefficients(1.0, 0.0, 1.0), 120, 2)
    packing = pack(range(len(lengths)), lengths, cost)
    assert max(batch.num_tokens for batch in packing.micro_batches) <= 120
    assert sum(batch.num_tokens for batch in packing.micro_batches) == 600


def test_micro_batches_run_in_falling_order_of_work() -> None:
    # Dealt longest first, 9 | 8 | 7 become 9 | 8+2 | 7+6: the first is now the shortest.
    lengths = [9, 8, 7, 6, 2]
    cost = SchemeCost(Coefficients(0.0, 1.0, 4.0), 13, 2)
    packing = pack(range(5), lengths, cost)
    work = [batch.num_tokens for batch in packing.micro_batches]
    assert work == sorted(work, reverse=True)
    assert len(work) > 1


def test_a_high_constant_cost_packs_to_the_last_token() -> None:
    lengths = [6, 5, 5, 4]
    cost = SchemeCost(Coefficients(0.0, 1.0, 100.0), 10, 2)
    packing = pack(range(4), lengths, cost)
    assert sorted(batch.num_tokens for batch in packing.micro_batches) == [10, 10]


def test_nothing_to_pack_takes_no_time() -> None:
    packing = pack([], [5], SchemeCost(Coefficients(0.0, 1.0, 1.0), 10, 2))
    assert packing.micro_batches == ()
    assert packing.time_ms == 0.0


@pytest.mark.parametrize("c_ms", [0.5, 2.0, 8.0])
def test_the_useful_number_minimises_the_time_of_equal_micro_batches(c_ms: float) -> None:
    work_ms, num_stages = 100.0, 5
    useful = useful_num_micro_batches(
        work_ms, SchemeCost(Coefficients(0.0, 1.0, c_ms), 10, num_stages)
    )

    def time_ms(v: float) -> float:
        return (v + num_stages - 1) * (work_ms / v + c_ms)

    assert time_ms(useful) < min(time_ms(useful * 0.9), time_ms(useful * 1.1))


def test_useful_numbers_at_the_ends() -> None:
    assert useful_num_micro_batches(9.0, SchemeCost(Coefficients(0.0, 1.0, 1.0), 10, 1)) == 1.0
    free = SchemeCost(Coefficients(0.0, 1.0, 0.0), 10, 2)
    assert useful_num_micro_batches(9.0, free) == math.inf
