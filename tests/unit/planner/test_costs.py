"""What a pool can hold, and the error if it cannot."""

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.costs import PoolCosts, checked_batch
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel

POOL = Pool.of(*(Strategy.parse(text, 4) for text in ("4*tp1", "tp2+2*tp1", "pp4")))


def able(limits: dict[tuple[int, int, int], int], lengths: list[int]) -> list[str]:
    costs = PoolCosts(POOL, TableCostModel(limits=limits))
    return [strategy.name for strategy in costs.feasible_strategies(lengths, 0)]


def test_a_strategy_is_able_when_one_of_its_replicas_holds_the_longest() -> None:
    limits = {(1, 1, 1): 100, (2, 1, 1): 300, (1, 1, 4): 200}
    assert able(limits, [100, 3]) == ["4*tp1", "tp2+2*tp1", "pp4"]
    assert able(limits, [3, 101]) == ["tp2+2*tp1", "pp4"]
    assert able(limits, [300]) == ["tp2+2*tp1"]


def test_a_strategy_with_a_replica_without_room_for_its_weights_is_not_able() -> None:
    assert able({(1, 1, 1): 0, (2, 1, 1): 300, (1, 1, 4): 200}, [5]) == ["pp4"]


def test_a_sequence_that_fits_nowhere_is_named_with_the_largest_limit() -> None:
    with pytest.raises(PlanError, match=r"sequence 1 has 301 tokens.*'tp2[+]2[*]tp1', is 300"):
        able({(1, 1, 1): 100, (2, 1, 1): 300, (1, 1, 4): 200}, [5, 301])


def test_a_pool_without_room_for_weights_is_refused() -> None:
    none = {(1, 1, 1): 0, (2, 1, 1): 0, (1, 1, 4): 0}
    with pytest.raises(PlanError, match=r"each of 3 strategies.*in '4[*]tp1' tp1; use larger"):
        able(none, [1])


def test_replicas_of_one_scheme_cost_the_same() -> None:
    costs = PoolCosts(POOL, TableCostModel(overheads={"pp4": 7.0}))
    strategy = POOL.strategy("tp2+2*tp1")
    of_replicas = costs.replica_costs(strategy)
    assert len(of_replicas) == 3
    assert len(set(of_replicas)) == 2
    assert [cost.num_stages for cost in costs.replica_costs(POOL.strategy("pp4"))] == [4]
    assert costs.limits.max_tokens(strategy, strategy.schemes[0]) == 4096
    assert costs.overheads_ms == {"4*tp1": 0.0, "tp2+2*tp1": 0.0, "pp4": 7.0}


def test_lengths_become_ints() -> None:
    assert checked_batch([3.0, 4.0], 0) == [3, 4]  # type: ignore[list-item]
    with pytest.raises(PlanError, match=r"iteration 10: .* sequence 2 has -1"):
        checked_batch([5, 6, -1], 9)
