"""Whatever HiGHS does, there is a plan: valid, no worse than the greedy one, and marked."""

import functools
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import highspy
import numpy as np
import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner import bounds
from megatron.hydraulis.planner import search as search_module
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.planner.solver import LinearModel, Outcome, solve
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel, sparse

RealHighs = highspy.Highs
Kinds = highspy.HighsModelStatus


class FaultyHighs:
    """HiGHS with a fault in the methods that a subclass overrides."""

    num_met = 0
    """Number of faults that happened, by subclass."""

    def __init__(self) -> None:
        self.highs = RealHighs()
        self.program = highspy.HighsLp()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.highs, name)

    def passModel(self, program: highspy.HighsLp) -> Any:
        self.program = program
        return self.highs.passModel(program)

    @property
    def is_faulty(self) -> bool:
        type(self).num_met += 1
        return True


class Raises(FaultyHighs):
    def run(self) -> Any:
        if self.is_faulty:
            raise RuntimeError("out of luck")
        return self.highs.run()


class OutOfMemory(FaultyHighs):
    def run(self) -> Any:
        if self.is_faulty:
            raise MemoryError
        return self.highs.run()


class RefusesOptions(FaultyHighs):
    def setOptionValue(self, name: str, value: object) -> Any:
        return highspy.HighsStatus.kError if self.is_faulty else self.highs.setOptionValue(name, 0)


class RefusesModels(FaultyHighs):
    def passModel(self, program: highspy.HighsLp) -> Any:
        self.program = program
        return highspy.HighsStatus.kError if self.is_faulty else self.highs.passModel(program)


class SaysInfeasible(FaultyHighs):
    status = Kinds.kInfeasible

    def getModelStatus(self) -> Any:
        return self.status if self.is_faulty else self.highs.getModelStatus()


class SaysUnbounded(SaysInfeasible):
    status = Kinds.kUnbounded


class SaysNothing(SaysInfeasible):
    status = Kinds.kNotset


class SaysSolveError(SaysInfeasible):
    status = Kinds.kSolveError


class Overruns(SaysInfeasible):
    status = Kinds.kTimeLimit


class Answers(FaultyHighs):
    """Returns its own answer as optimal, with matching cost, bound and duals."""

    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(self.highs.getSolution().col_value)

    def getModelStatus(self) -> Any:
        return Kinds.kOptimal if self.is_faulty else self.highs.getModelStatus()

    def getSolution(self) -> Any:
        honest = self.highs.getSolution()
        if not self.is_faulty:
            return honest
        return SimpleNamespace(
            col_value=self.answer(), row_dual=honest.row_dual, col_dual=honest.col_dual
        )

    def getInfo(self) -> Any:
        if not self.is_faulty:
            return self.highs.getInfo()
        values, cost = self.answer(), np.array(self.program.col_cost_)
        costs = float(cost @ values) if len(values) == len(cost) else 0.0
        return SimpleNamespace(objective_function_value=costs)


class AnswersNothing(Answers):
    """Everything 0: violates the rows that assign every sequence."""

    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.zeros(self.program.num_col_)


class AnswersInPart(Answers):
    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return super().answer()[:-1]


class AnswersNan(Answers):
    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return super().answer() * math.nan


class AnswersBelowTheLimits(Answers):
    """Some columns larger, others negative: rows may hold."""

    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return super().answer() - 1.0


class AnswersTheWorst(Answers):
    """The most expensive feasible answer, with a bound that claims it is optimal."""

    def answer(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        worst = RealHighs()
        worst.setOptionValue("output_flag", False)
        program = self.program
        cost = np.array(program.col_cost_)
        upper = np.array(program.col_upper_)
        program.col_cost_ = -cost
        program.col_upper_ = np.minimum(upper, 1e5)
        worst.passModel(program)
        program.col_cost_, program.col_upper_ = cost, upper
        worst.run()
        return np.array(worst.getSolution().col_value)


class ClaimsACheaperAnswer(Answers):
    def getInfo(self) -> Any:
        honest = super().getInfo()
        honest.objective_function_value -= 100.0
        return honest


FAULTS = [
    Raises,
    OutOfMemory,
    RefusesOptions,
    RefusesModels,
    SaysInfeasible,
    SaysUnbounded,
    SaysNothing,
    SaysSolveError,
    Overruns,
    AnswersNothing,
    AnswersInPart,
    AnswersNan,
    AnswersBelowTheLimits,
    AnswersTheWorst,
    ClaimsACheaperAnswer,
]


@dataclass(frozen=True)
class Case:
    """A batch on a pool whose search runs linear programs."""

    pool: Pool
    lengths: tuple[int, ...]

    @property
    def model(self) -> TableCostModel:
        return TableCostModel(
            default_limit=1000,
            times=lambda scheme: Coefficients(1e-4 / scheme.num_ranks, 0.2 / scheme.num_ranks, 8.0),
        )

    def plan(self, **options: Any) -> IterationPlan:
        return CertifiedPlanner(self.pool, self.model, **options).plan(self.lengths)

    def check(self, plan: IterationPlan) -> None:
        """Valid by the checker that shares no code, and no worse than the greedy plan."""
        plan.validate(self.lengths, self.pool.strategy(plan.strategy), self.model.max_tokens)
        greedy = GreedyPlanner(self.pool, self.model).plan(self.lengths)
        assert plan.predicted_time_s <= greedy.predicted_time_s * (1 + 1e-9)


LONG_TAIL = (144, 121, 58, 21, 291, 183, 46, 303, 778, 362, 381, 63, 206, 900)


def batch(seed: int, num: int, shortest: int) -> tuple[int, ...]:
    """Few sequences per replica, so that bounds do not meet plans."""
    draws = random.Random(seed)
    return tuple(draws.randint(shortest, 600) for _ in range(num))


CASES = {
    "one class": Case(Pool.of(Strategy.parse("12*tp1", 12)), batch(0, 26, 300)),
    "classes": Case(Pool.of(Strategy.parse("tp2+4*tp1", 6)), batch(0, 24, 150)),
    "pipelines": Case(Pool.of(Strategy.parse("2*pp2", 4)), LONG_TAIL),
    "waves": Case(Pool.of(Strategy.parse("cp4~", 4)), batch(1, 9, 300)),
}


@pytest.fixture(params=["classes", "pipelines"])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def break_highs(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[FaultyHighs]], None]:
    """Install a faulty HiGHS; clears cached shapes of pipelines."""

    def install(fault: type[FaultyHighs]) -> None:
        fault.num_met = 0
        bounds._best_shapes.cache_clear()
        monkeypatch.setattr(highspy, "Highs", fault)

    return install


def statuses(plan: IterationPlan) -> set[str]:
    assert plan.dispatch is not None
    assert plan.packing is not None
    return {plan.dispatch.status, plan.packing.status}


@functools.cache
def correct_plan(name: str) -> IterationPlan:
    return CASES[name].plan()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("classes", fault) for fault in FAULTS),
        *(("waves", fault) for fault in (Raises, AnswersTheWorst)),
        *(("pipelines", fault) for fault in (Raises, AnswersNan, AnswersTheWorst)),
        ("one class", AnswersTheWorst),
    ],
)
def test_a_valid_marked_plan_comes_out(
    name: str, fault: type[FaultyHighs], break_highs: Callable[[type[FaultyHighs]], None]
) -> None:
    case, honest = CASES[name], correct_plan(name)
    assert not any(status.startswith(("solver", "greedy")) for status in statuses(honest))
    break_highs(fault)
    plan = case.plan()
    case.check(plan)
    assert fault.num_met
    assert all(status.startswith(("solver ", "greedy: ")) for status in statuses(plan))
    # A wrong bound must not get into the plan: neither plan is below the bound.
    assert plan.dispatch is not None
    assert honest.dispatch is not None
    assert plan.dispatch.bound_s <= honest.dispatch.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("fault", [Overruns, AnswersTheWorst])
def test_the_same_fault_gives_the_same_plan(
    fault: type[FaultyHighs], break_highs: Callable[[type[FaultyHighs]], None]
) -> None:
    break_highs(fault)
    digests = {CASES["waves"].plan().digest for _ in range(2)}
    assert len(digests) == 1


def test_a_slow_solver_is_ended_by_the_guard(
    case: Case, break_highs: Callable[[type[FaultyHighs]], None]
) -> None:
    class Slow(FaultyHighs):
        def run(self) -> Any:
            type(self).num_met += 1
            time.sleep(0.03)  # it ignores its time limit
            return self.highs.run()

    break_highs(Slow)
    plan = case.plan(time_limit_s=0.02)
    case.check(plan)
    assert statuses(plan) in ({"time limit"}, {"greedy: SolverError"})
    # Nothing is solved after the time is over. Shapes of pipelines are computed once and cached;
    # they have a separate guard.
    assert case is CASES["pipelines"] or Slow.num_met <= 1


@pytest.mark.parametrize("limit_s", [1e-9, 1e-3])
def test_without_time_the_greedy_plan_is_marked(case: Case, limit_s: float) -> None:
    plan = case.plan(time_limit_s=limit_s)
    case.check(plan)
    assert statuses(plan) == {"time limit"}
    assert plan.dispatch is not None
    assert 0.0 < plan.dispatch.bound_s <= plan.dispatch.objective_s


def test_a_late_answer_is_not_used() -> None:
    """But an optimum is one on any machine."""
    clock = iter([0.0, 7.0, 0.0, 7.0]).__next__
    late = solve(half_of_all(), guard_s=5.0, num_iterations=0, clock=clock)
    assert (late.outcome, late.values) == (Outcome.OVERRUN, None)
    assert solve(half_of_all(), guard_s=5.0, clock=clock).outcome is Outcome.OPTIMAL


def test_a_zero_time_limit_is_an_overrun() -> None:
    assert solve(half_of_all(), guard_s=0.0).outcome is Outcome.OVERRUN


def half_of_all() -> LinearModel:
    """The cheapest half of 30 weights, by three measures at once."""
    weights = np.random.default_rng(0).integers(10, 99, size=(3, 30)).astype(np.float64)
    half = weights.sum(axis=1) / 2
    return LinearModel(
        cost=np.arange(30.0),
        lower=np.zeros(30),
        upper=np.ones(30),
        matrix=sparse(weights),
        row_lower=half,
        row_upper=half,
    )


@pytest.mark.parametrize("place", ["start", "raise_bound", "search", "candidate"])
def test_an_error_in_the_search_itself_leaves_the_greedy_plan(
    place: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(place)

    monkeypatch.setattr(search_module.StrategySearch, place, broken)
    plan = case.plan()
    case.check(plan)
    assert statuses(plan) == {"greedy: ZeroDivisionError"}


def test_a_search_that_loses_a_sequence_leaves_the_greedy_plan(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is checked after the search, independently of it."""
    honest = search_module.StrategySearch.candidate

    def lossy(search: search_module.StrategySearch) -> Any:
        candidate = honest(search)
        packings = list(candidate.packings)
        fullest = max(range(len(packings)), key=lambda k: len(packings[k].micro_batches))
        packings[fullest] = type(packings[fullest])(
            packings[fullest].micro_batches[1:], packings[fullest].time_ms
        )
        return type(candidate)(
            strategy=candidate.strategy,
            packings=packings,
            overhead_ms=candidate.overhead_ms,
            dispatch=candidate.dispatch,
            packing=candidate.packing,
        )

    monkeypatch.setattr(search_module.StrategySearch, "candidate", lossy)
    plan = case.plan()
    case.check(plan)
    assert statuses(plan) == {"greedy: PlanError"}


def test_the_explanation_of_a_failed_search_is_the_greedy_planners(
    case: Case, break_highs: Callable[[type[FaultyHighs]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_highs(Raises)
    explained = CertifiedPlanner(case.pool, case.model).explain(case.lengths)
    assert explained.plan.digest == case.plan().digest
    monkeypatch.setattr(search_module.StrategySearch, "start", functools.partial(math.sqrt, -1.0))
    explained = CertifiedPlanner(case.pool, case.model).explain(case.lengths)
    assert [outcome.name for outcome in explained.strategies if outcome.is_chosen] == [
        explained.plan.strategy
    ]
    assert json.dumps(explained.plan.to_json())
