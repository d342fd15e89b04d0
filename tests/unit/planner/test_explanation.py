"""Why a strategy was chosen: outcomes that make sense, and the tables that show them."""

import ctypes
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.command import replica_table, strategy_table, summary
from megatron.hydraulis.planner.plan import PlanExplanation, StrategyOutcome
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel
from tests.support.planning_files import write_files

POOL = Pool.of(Strategy.parse("tp2@1,0+2*tp1", 4), Strategy.parse("pp2+2*idle", 4))


def outcome(
    bound_s: float | None, found_s: float | None, *, name: str = "a", why: str = ""
) -> StrategyOutcome:
    return StrategyOutcome(name=name, bound_s=bound_s, found_s=found_s, why_not_chosen=why)


def rendered(*tables: object) -> list[list[str]]:
    """The cells of all rows of the tables."""
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_gap_of_an_outcome() -> None:
    assert outcome(0.9, 1.0).gap == pytest.approx(0.1)
    assert outcome(0.0, 0.0).gap == 0.0
    assert outcome(1.0, 1.0 - 1e-12).gap == 0.0
    assert outcome(None, None).gap is None
    assert outcome(0.5, None).gap is None


def test_nothing_is_better_than_a_bound() -> None:
    with pytest.raises(PlanError, match=r"'a': .* a plan takes 0.9 s and the bound is 1.0 s"):
        outcome(1.0, 0.9)


@pytest.mark.parametrize("marked", [[], ["tp2@1,0+2*tp1", "pp2+2*idle"], ["pp2+2*idle"]])
def test_exactly_the_plans_strategy_is_chosen(marked: list[str]) -> None:
    plan = GreedyPlanner(POOL, TableCostModel()).plan([100, 200, 300])
    assert plan.strategy == POOL.strategies[0].name
    names = [strategy.name for strategy in POOL.strategies]
    outcomes = tuple(
        outcome(0.0, 1.0, name=name, why="" if place in marked else "slow")
        for name, place in zip(names, ("tp2@1,0+2*tp1", "pp2+2*idle"), strict=True)
    )
    with pytest.raises(PlanError, match="one strategy is chosen, the plan's"):
        PlanExplanation(plan=plan, strategies=outcomes)


@pytest.mark.parametrize("planner", [GreedyPlanner, CertifiedPlanner])
def test_every_strategy_has_a_row_and_every_replica(
    planner: type[GreedyPlanner] | type[CertifiedPlanner],
) -> None:
    model = TableCostModel(limits={(1, 1, 2): 250})
    explanation = planner(POOL, model).explain([100, 200, 300, 50])
    plan = explanation.plan
    rows = rendered(strategy_table(explanation, POOL))
    assert [row[0] for row in rows] == [strategy.name for strategy in POOL.strategies]
    assert [row[1] for row in rows] == [str(strategy) for strategy in POOL.strategies]
    assert rows[0][5] == "chosen"
    assert float(rows[0][3]) == pytest.approx(plan.predicted_time_s, abs=1e-4)
    assert rows[1][2:5] == ["–", "–", "–"]
    replicas = rendered(replica_table(plan, model))
    assert [row[:2] for row in replicas] == [["tp2", "1,0"], ["tp1", "2"], ["tp1", "3"]]
    assert sum(int(row[3]) for row in replicas) == 650
    assert min(float(row[6]) for row in replicas) == 0.0
    text = summary(plan)
    assert text.startswith(f"strategy {plan.strategy}: {plan.predicted_time_s:.4f} s predicted")
    assert "4 sequences, 650 tokens" in text


def test_where_nothing_takes_time_nothing_is_idle() -> None:
    model = TableCostModel(times=lambda scheme: Coefficients(0.0, 0.0, 0.0))
    for planner in (GreedyPlanner(POOL, model), CertifiedPlanner(POOL, model)):
        plan = planner.plan([100, 200, 300])
        assert plan.predicted_time_s == 0.0
        assert {row[6] for row in rendered(replica_table(plan, model))} == {"0.0"}
        assert plan.dispatch is not None
        assert "Error" not in plan.dispatch.status


def test_what_a_solver_prints_does_not_get_into_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS prints by C's own output, which is written when its buffer is full or flushed."""
    honest = CertifiedPlanner.explain
    native = ctypes.CDLL(None)

    def noisy(
        planner: CertifiedPlanner, lengths: Sequence[int], *, iteration: int = 0
    ) -> PlanExplanation:
        native.printf(b"a word of the solver\n")
        return honest(planner, lengths, iteration=iteration)

    monkeypatch.setattr(CertifiedPlanner, "explain", noisy)
    assert main(["plan", *write_files(tmp_path), "--json"]) == 0
    native.fflush(None)
    printed = capfd.readouterr()
    assert math.isfinite(json.loads(printed.out)["plan"]["predicted_time_s"])
    assert printed.err == "a word of the solver\n"
