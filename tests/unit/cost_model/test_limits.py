"""Precedence of token limits, and planning with limits."""

import pytest

from megatron.hydraulis.cost_model.limits import (
    Limits,
    MemoryTrial,
    after_failure,
    allowed_tokens,
)
from megatron.hydraulis.errors import ConfigurationError, PlanError, StrategyError
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel

TP1, TP2 = Scheme(), Scheme(tp=2)
WAVES = Scheme(tp=2, cp=4, splits_cp=True)
MODEL = TableCostModel(limits={(1, 1, 1): 1000, (2, 1, 1): 4000})


def of_pool_file(replicas: str, **max_tokens: int) -> Strategy:
    strategy = {"name": "own", "replicas": replicas}
    num_ranks = {"tp2+2*tp1": 4, "tp2cp4~": 8, "tp2cp4~+tp2": 10}[replicas]
    entry = strategy | ({"max_tokens": max_tokens} if max_tokens else {})
    pool = {"num_ranks": num_ranks, "ranks_per_node": num_ranks, "strategies": [entry]}
    return Pool.from_json(pool).strategies[0]


def groups(limits: Limits, strategy: Strategy) -> list[int]:
    return [limits.max_tokens(strategy, Scheme(tp=2, cp=cp)) for cp in (1, 2, 4)]


class TestPrecedence:
    def test_memory_decides_if_nothing_else_is_set(self) -> None:
        strategy = of_pool_file("tp2+2*tp1")
        limits = Limits(MODEL)
        assert [limits.max_tokens(strategy, s) for s in strategy.schemes] == [4000, 1000]

    def test_max_tokens_of_the_pool_file_replaces_memory_up_and_down(self) -> None:
        strategy = of_pool_file("tp2+2*tp1", tp1=1700)
        limits = Limits(MODEL)
        assert [limits.max_tokens(strategy, s) for s in strategy.schemes] == [4000, 1700]
        # Only in that strategy, and not in profiles that are written.
        assert limits.max_tokens(of_pool_file("tp2+2*tp1"), TP1) == 1000
        assert limits.of_scheme(TP1) == 1000

    def test_the_flag_replaces_both_and_is_rounded_down(self) -> None:
        strategy = of_pool_file("tp2+2*tp1", tp1=700)
        limits = Limits(MODEL, 5001)
        assert [limits.max_tokens(strategy, s) for s in strategy.schemes] == [5000, 5001]
        assert limits.of_scheme(Scheme(cp=4)) == 5000

    def test_measured_limits_only_reduce(self) -> None:
        plain, own = of_pool_file("tp2+2*tp1"), of_pool_file("tp2+2*tp1", tp1=700)
        measured = ((TP1, 800), (TP2, 9999))
        for limits, wanted in (
            (Limits(MODEL, None, measured), ([4000, 800], [4000, 700])),
            (Limits(MODEL, 600, measured), ([600, 600], [600, 600])),
            (Limits(MODEL, 900, measured), ([900, 800], [900, 800])),
        ):
            found = [[limits.max_tokens(s, each) for each in s.schemes] for s in (plain, own)]
            assert found == list(wanted)

    def test_a_flag_below_one_token(self) -> None:
        with pytest.raises(ConfigurationError, match="at least 1 token but the limit is 0"):
            Limits(MODEL, 0)

    def test_a_scheme_that_the_cost_model_does_not_know(self) -> None:
        class Unknown(TableCostModel):
            def max_tokens(self, scheme: Scheme) -> int:
                raise StrategyError("unknown")

        strategy = of_pool_file("tp2cp4~", **{"tp2cp4~": 1001})
        assert groups(Limits(Unknown()), strategy) == [250, 496, 1001 // 16 * 16]
        with pytest.raises(StrategyError):
            Limits(Unknown()).max_tokens(strategy, TP1)


class TestWaves:
    def test_set_limits_hold_for_the_wave(self) -> None:
        """A group holds its share, rounded down to what its tp and cp ranks divide evenly."""
        strategy = of_pool_file("tp2cp4~", **{"tp2cp4~": 1001})
        assert Limits(MODEL).max_tokens(strategy, WAVES) == 1001
        assert groups(Limits(MODEL), strategy) == [250, 496, 992]
        plain = of_pool_file("tp2cp4~")
        assert Limits(MODEL, 1001).max_tokens(plain, WAVES) == 992
        assert groups(Limits(MODEL, 1001), plain) == [248, 496, 992]

    def test_a_group_that_is_a_scheme_of_the_strategy_has_its_own_limit(self) -> None:
        strategy = of_pool_file("tp2cp4~+tp2", **{"tp2cp4~": 1001})
        assert groups(Limits(MODEL), strategy) == [4000, 496, 992]
        assert groups(Limits(MODEL, 1001), of_pool_file("tp2cp4~+tp2")) == [1000, 496, 992]

    def test_by_memory_every_group_has_its_own_limit(self) -> None:
        strategy = of_pool_file("tp2cp4~")
        assert groups(Limits(MODEL), strategy) == [4000, 4096, 4096]
        measured = Limits(MODEL, None, ((Scheme(tp=2, cp=2), 300), (Scheme(tp=2, cp=4), 1584)))
        assert groups(measured, strategy) == [4000, 300, 1584]
        assert measured.max_tokens(strategy, WAVES) == 1584

    def test_a_set_limit_follows_the_group_with_the_least_room(self) -> None:
        strategy = of_pool_file("tp2cp4~", **{"tp2cp4~": 1600})
        # A group of 2 of the 4 columns would hold 800 tokens, but memory holds 300.
        limits = Limits(MODEL).reduced([(Scheme(tp=2, cp=2), 300), (Scheme(tp=2, cp=4), 1584)])
        assert limits.max_tokens(strategy, WAVES) == 600
        assert groups(limits, strategy) == [150, 296, 592]
        assert not limits.reduced([(TP2, 0)]).holds(strategy)


class TestRows:
    strategy = of_pool_file("tp2+2*tp1")

    def row(self, quantum: int, scheme: Scheme, *lengths: int, flag: int | None = None) -> int:
        return Limits(MODEL, flag, row_quantum=quantum).row_tokens(self.strategy, scheme, lengths)

    def test_rows_are_rounded_up_to_a_multiple_of_quantum_and_tp(self) -> None:
        assert [self.row(1, scheme, 70, 31) for scheme in (TP1, TP2)] == [101, 102]
        assert [self.row(64, scheme, 70, 31) for scheme in (TP1, TP2)] == [128, 128]
        assert [self.row(5, scheme, 70, 31) for scheme in (TP1, TP2)] == [105, 110]

    def test_but_not_beyond_the_limit(self) -> None:
        assert self.row(64, TP1, 961) == 1000  # the limit itself is one more size
        assert self.row(64, TP2, 10, flag=51) == 50
        assert self.row(4096, TP1, 5) == 1000
        # With cp = 1 a limit counts sequences only, so padding for tp may exceed it.
        assert self.row(64, TP2, 51, flag=51) == 52

    def test_a_group_without_sequences_runs_a_row_of_the_quantum(self) -> None:
        strategy = of_pool_file("tp2cp4~")
        limits = Limits(MODEL, row_quantum=64)
        rows = [limits.row_tokens(strategy, Scheme(tp=2, cp=cp), ()) for cp in (1, 2, 4)]
        assert rows == [64, 64, 64]
        assert Limits(MODEL).row_tokens(strategy, Scheme(tp=2, cp=2), ()) == 8

    def test_a_quantum_below_one(self) -> None:
        with pytest.raises(ConfigurationError, match="--row-quantum-tokens is at least 1 but is 0"):
            Limits(MODEL, row_quantum=0)


def test_of_several_measured_limits_the_lowest_counts() -> None:
    limits = Limits(MODEL).reduced([(TP2, 50), (TP1, 30), (TP1, 70)]).reduced([(TP2, 70)])
    assert dict(limits.measured) == {TP2: 50, TP1: 30}


def test_a_strategy_without_room_for_a_token() -> None:
    strategy = of_pool_file("tp2+2*tp1", tp1=700)
    assert Limits(MODEL).holds(strategy)
    assert not Limits(MODEL).reduced([(TP1, 0)]).holds(strategy)
    assert not Limits(TableCostModel(default_limit=0)).holds(strategy)


class TestPlanning:
    pool = Pool.of(of_pool_file("tp2+2*tp1"), Strategy.parse("4*tp1", 4, name="plain"))

    def test_the_planner_keeps_to_limits(self) -> None:
        lengths = [600] * 12
        own = of_pool_file("tp2+2*tp1", tp1=1200)
        roomy = Pool.of(own, self.pool.strategies[1])
        assert GreedyPlanner(roomy, MODEL).plan(lengths).strategy == "own"
        tight = Pool.of(of_pool_file("tp2+2*tp1", tp1=600))
        with_flag = GreedyPlanner(self.pool, MODEL, Limits(MODEL, 600)).plan(lengths)
        for plan in (GreedyPlanner(tight, MODEL).plan(lengths), with_flag):
            small = [replica for replica in plan.replicas if replica.scheme.tp == 1]
            assert {b.num_tokens for replica in small for b in replica.micro_batches} == {600}
        largest = Pool.of(of_pool_file("tp2+2*tp1", tp2=2000))
        with pytest.raises(PlanError, match="strategy 'own', is 2000"):
            GreedyPlanner(largest, MODEL).plan([2001])


def trial(peak_bytes: int, *, num_tokens: int = 100, capacity_bytes: int = 1000) -> MemoryTrial:
    return MemoryTrial(
        num_tokens=num_tokens,
        idle_bytes=200,
        peak_bytes=peak_bytes,
        capacity_bytes=capacity_bytes,
    )


@pytest.mark.parametrize(
    ("peaks", "allowed"),
    [
        ([300], 800),  # 1 byte a token: 200 + 800 is all there is
        ([290], 800),  # and not above the limit if there is room
        ([360], 500),  # 1.6 bytes a token
        ([360, 300, 401], 398),  # the rank with the least room: 2.01 bytes, 398.01 tokens
        ([200], 800),  # nothing measured above idle
    ],
)
def test_line_through_two_points(peaks: list[int], allowed: int) -> None:
    assert allowed_tokens(800, TP2, [trial(peak) for peak in peaks]) == allowed


def test_no_room_at_all() -> None:
    assert allowed_tokens(800, TP2, [trial(300, capacity_bytes=150)]) == 0
    assert allowed_tokens(800, TP2, []) == 800


def test_after_a_failure_three_quarters() -> None:
    assert after_failure(100, TP2) == 74
    assert after_failure(1, TP2) == 0
