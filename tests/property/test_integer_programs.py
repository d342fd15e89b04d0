"""Packing, dispatch, whole plans and brute force against programs for scipy's solver.

The programs here share no row with the planner's: they hold every sequence, micro-batch and
operation one by one and nothing is rounded, bucketed or cut.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch
from megatron.hydraulis.planner.improve import Assignment, dispatch_by_program
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.solver import (
    Deadline,
    LinearModel,
    Outcome,
    Solver,
    solve,
)
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.brute_force import best_makespan_ms, best_replica_time_ms, figures_of, operations
from tests.support.planning import TableCostModel, sparse

# Tolerances of both solvers.
CLOSE = 1e-5


class Program:
    """An integer program for scipy, built row by row with named columns."""

    def __init__(self) -> None:
        self.columns: dict[object, int] = {}
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def column(self, name: object, *, upper: float = np.inf, integral: bool = False) -> object:
        self.columns[name] = len(self.columns)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return name

    def row(self, terms: Sequence[tuple[object, float]], low: float, high: float) -> None:
        row: dict[int, float] = defaultdict(float)
        for name, factor in terms:
            row[self.columns[name]] += factor
        self.rows.append((row, low, high))

    def least(self, name: object) -> float:
        """The least value of a column; infinite if the rows are infeasible."""
        matrix = np.zeros((len(self.rows), len(self.columns)))
        for place, (row, _, _) in enumerate(self.rows):
            for column, factor in row.items():
                matrix[place, column] = factor
        cost = np.zeros(len(self.columns))
        cost[self.columns[name]] = 1.0
        answer = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
            ),
            options={"mip_rel_gap": 0.0},
        )
        if answer.status == 2:
            return math.inf
        assert answer.status == 0
        return float(answer.fun)


def cost_of(
    a: float, b: float, c: float, *, max_tokens: int = 10_000, num_stages: int = 1
) -> SchemeCost:
    return SchemeCost(Coefficients(a, b, c), max_tokens, num_stages)


def new_solver() -> Solver:
    return Solver(Deadline(None))


# ---------------------------------------------------------------- the solver


@st.composite
def coverings(draw: st.DrawFn) -> LinearModel:
    """Feasible programs."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    numbers = st.integers(0, 20)
    matrix = np.array([[float(draw(numbers)) for _ in range(num_columns)] for _ in range(num_rows)])
    feasible = np.array([float(draw(st.integers(0, 4))) for _ in range(num_columns)])
    wanted = np.floor(matrix @ feasible * draw(st.floats(0.3, 1.0)))
    return LinearModel(
        cost=np.array([float(draw(st.integers(0, 9))) for _ in range(num_columns)]),
        lower=np.zeros(num_columns),
        upper=np.full(num_columns, 5.0),
        matrix=sparse(matrix),
        row_lower=wanted,
        row_upper=np.full(num_rows, np.inf),
    )


@given(coverings())
def test_optima_are_scipys(model: LinearModel) -> None:
    solution = solve(model)
    assert solution.outcome is Outcome.OPTIMAL
    entries = model.matrix
    matrix = csr_array((entries.values, (entries.rows, entries.columns)), entries.shape)
    answer = milp(
        model.cost,
        bounds=Bounds(model.lower, model.upper),
        constraints=LinearConstraint(matrix, model.row_lower, model.row_upper),
    )
    size = 1.0 + abs(answer.fun)
    assert solution.bound <= answer.fun + CLOSE * size
    assert abs(solution.objective - answer.fun) <= CLOSE * size
    assert solution.values is not None
    assert solution.bound <= solution.objective


# ---------------------------------------------------------------- packing


def least_pipeline_ms(lengths: Sequence[int], cost: SchemeCost, num: int) -> float:
    """The least 1F1B time of num micro-batches, all packings and orders, by scipy."""
    program = Program()
    program.column("end")
    for i, k in itertools.product(range(len(lengths)), range(num)):
        program.column((i, k), upper=1.0, integral=True)
    for i in range(len(lengths)):
        program.row([((i, k), 1.0) for k in range(num)], 1.0, 1.0)
    for k in range(num):
        program.column(("work", k))
        works = [((i, k), -cost.sequence_time_ms(length)) for i, length in enumerate(lengths)]
        c_ms = cost.coefficients.c_ms
        program.row([(("work", k), 1.0), *works], c_ms, c_ms)
        held = [((i, k), float(length)) for i, length in enumerate(lengths)]
        program.row(held, -np.inf, float(cost.max_tokens))
    share = {"forward": 1.0 / 3.0, "backward": 2.0 / 3.0}

    def follows(later: object, earlier: tuple[str, int, int]) -> None:
        kind, _, k = earlier
        program.row([(later, 1.0), (earlier, -1.0), (("work", k), -share[kind])], 0.0, np.inf)

    for stage in range(cost.num_stages):
        for kind, k in operations(cost.num_stages, num, stage):
            program.column((kind, stage, k))
    for stage in range(cost.num_stages):
        order = operations(cost.num_stages, num, stage)
        for (kind, k), (next_kind, next_k) in itertools.pairwise(order):
            follows((next_kind, stage, next_k), (kind, stage, k))
        for k in range(num):
            if stage > 0:
                follows(("forward", stage, k), ("forward", stage - 1, k))
                follows(("backward", stage - 1, k), ("backward", stage, k))
    follows("end", ("backward", 0, num - 1))
    return program.least("end")


# ---------------------------------------------------------------- dispatch


def least_makespan_ms(lengths: Sequence[int], costs: Sequence[SchemeCost]) -> float:
    """The least makespan of single-stage replicas, all dispatches and packings, by scipy."""
    program = Program()
    program.column("makespan")
    places = [(r, k) for r in range(len(costs)) for k in range(len(lengths))]
    for r, k in places:
        program.column(("used", r, k), upper=1.0, integral=True)
        for i in range(k, len(lengths)):  # micro-batch k starts with sequence k or a later one
            program.column((i, r, k), upper=1.0, integral=True)
    for i in range(len(lengths)):
        program.row([((i, r, k), 1.0) for r, k in places if k <= i], 1.0, 1.0)
    for r, k in places:
        held = [((i, r, k), float(lengths[i])) for i in range(k, len(lengths))]
        program.row([*held, (("used", r, k), -float(costs[r].max_tokens))], -np.inf, 0.0)
    for r, cost in enumerate(costs):
        terms: list[tuple[object, float]] = [("makespan", -1.0)]
        for k in range(len(lengths)):
            terms.append((("used", r, k), cost.coefficients.c_ms))
            for i in range(k, len(lengths)):
                terms.append(((i, r, k), cost.sequence_time_ms(lengths[i])))
        program.row(terms, -np.inf, 0.0)
    return program.least("makespan")


def single_stage_costs() -> st.SearchStrategy[list[SchemeCost]]:
    """Up to three replicas, of which the first holds every sequence."""
    one = st.builds(
        cost_of,
        st.sampled_from([0.0, 1e-3, 0.02]),
        st.sampled_from([0.1, 0.4]),
        st.sampled_from([0.0, 3.0, 15.0]),
        max_tokens=st.sampled_from([30, 45, 80]),
    )
    wide = st.builds(cost_of, st.just(1e-3), st.just(0.2), st.just(5.0), max_tokens=st.just(60))
    return st.builds(
        lambda first, others, again: [first, *others, *([others[0]] if again and others else [])],
        wide,
        st.lists(one, max_size=1),
        st.booleans(),
    )


@settings(max_examples=40)
@example([56] * 4, [cost_of(1e-3, 0.2, 5.0, max_tokens=60)], 1, 0.0)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    single_stage_costs(),
    st.integers(1, 6),
    st.floats(0.0, 1.0),
)
def test_no_feasible_dispatch_is_called_infeasible(
    lengths: list[int], costs: list[SchemeCost], num_buckets: int, share: float
) -> None:
    """Even with few buckets, so that most lengths are rounded."""
    packers = {cost: ReplicaPacker(cost, lengths, Solver(Deadline(None))) for cost in costs}
    of_replica = [packers[cost] for cost in costs]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    greedy = Assignment(of_replica, dispatch(order, lengths, costs), Effort(1e7))
    best_ms = least_makespan_ms(lengths, costs)
    assert best_ms <= greedy.makespan_ms * (1 + CLOSE)
    relaxation = Relaxation(
        ReplicaClass.of(costs), sorted(lengths), num_buckets=num_buckets, solver=new_solver()
    )
    time_ms = best_ms * (1 + CLOSE) + share * (greedy.makespan_ms - best_ms)
    assert not relaxation.is_impossible(time_ms)
    shares = dispatch_by_program(relaxation, time_ms, of_replica, longest_fill=math.inf)
    assert relaxation.solver.trouble is None
    assert shares is not None
    assert sorted(i for held in shares for i in held) == list(range(len(lengths)))
    for held, cost in zip(shares, costs, strict=True):
        assert all(lengths[i] <= cost.max_tokens for i in held)
        assert held == sorted(held, key=lambda i: (-lengths[i], i))
    # Half of the necessary work is not enough.
    least_ms = max(
        min(cost.coefficients.time_ms((n,)) for cost in costs if n <= cost.max_tokens)
        for n in lengths
    )
    assert relaxation.is_impossible(0.5 * least_ms)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), single_stage_costs())
def test_brute_force_finds_scipys_optimum(lengths: list[int], costs: list[SchemeCost]) -> None:
    """Other tests compare plans with brute force."""
    found_ms = best_makespan_ms(lengths, [figures_of(cost) for cost in costs])
    assert found_ms == pytest.approx(least_makespan_ms(lengths, costs), rel=CLOSE)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(2, 3))
def test_brute_force_finds_scipys_shortest_pipeline(lengths: list[int], num_stages: int) -> None:
    cost = cost_of(0.02, 0.3, 4.0, max_tokens=max(lengths) + 10, num_stages=num_stages)
    best_ms = min(least_pipeline_ms(lengths, cost, num) for num in range(1, len(lengths) + 1))
    assert best_replica_time_ms(lengths, figures_of(cost)) == pytest.approx(best_ms, rel=CLOSE)


POOLS = [("tp2", "2*tp1"), ("tp2+2*tp1", "2*tp2"), ("3*tp1+idle",)]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.sampled_from(POOLS),
    st.sampled_from([(0.0, 0.3, 4.0), (5e-3, 0.1, 10.0), (2e-3, 0.5, 0.0)]),
    st.integers(30, 90),
)
def test_plans_are_within_their_gap_of_scipys_optimum(
    lengths: list[int], texts: tuple[str, ...], abc: tuple[float, float, float], limit: int
) -> None:
    a, b, c = abc
    model = TableCostModel(
        limits={(1, 1, 1): limit},
        default_limit=2 * limit,
        times=lambda scheme: Coefficients(a / scheme.num_ranks, b / scheme.num_ranks, c),
    )
    strategies = [Strategy.parse(text, 2 if texts is POOLS[0] else 4) for text in texts]
    pool = Pool.of(*strategies)
    assume(max(lengths) <= (2 * limit if texts is not POOLS[2] else limit))
    best_ms = {}
    for strategy in strategies:
        costs = [
            SchemeCost(model.coefficients(r.scheme), model.max_tokens(r.scheme), 1)
            for r in strategy.replicas
        ]
        if max(lengths) <= max(cost.max_tokens for cost in costs):
            best_ms[strategy.name] = least_makespan_ms(lengths, costs)
    explained = CertifiedPlanner(pool, model).explain(lengths)
    plan = explained.plan
    time_ms = 1e3 * plan.predicted_time_s
    assert plan.dispatch is not None
    # The plan's time is not below the optimum, and its bound is not above it.
    assert best_ms[plan.strategy] <= time_ms * (1 + CLOSE)
    assert 1e3 * plan.dispatch.bound_s <= best_ms[plan.strategy] * (1 + CLOSE)
    assert time_ms * (1.0 - plan.dispatch.gap) <= best_ms[plan.strategy] * (1 + CLOSE)
    if plan.dispatch.status == "certified":
        assert time_ms <= min(best_ms.values()) * (1 + 1.1e-3)
    for outcome in explained.strategies:
        if outcome.bound_s is None:
            assert outcome.name not in best_ms
        else:
            assert 1e3 * outcome.bound_s <= best_ms[outcome.name] * (1 + CLOSE)
            assert outcome.found_s is not None
            assert best_ms[outcome.name] <= 1e3 * outcome.found_s * (1 + CLOSE)


def test_the_programs_of_this_file_have_known_optima() -> None:
    """4, 1, 4 on two stages takes 12.33 in the best order."""
    in_threes = cost_of(0.0, 1.0, 0.0, max_tokens=4, num_stages=2)
    assert least_pipeline_ms([4, 4, 1], in_threes, 3) == pytest.approx(12 + 1 / 3)
    one = [cost_of(0.0, 0.0, 1.0, max_tokens=10)]
    assert least_makespan_ms([4, 4, 3, 3, 3, 3], one) == pytest.approx(2.0)
    assert least_makespan_ms([6, 6, 5], one * 2) == pytest.approx(2.0)
    assert math.isinf(least_makespan_ms([11], one))
