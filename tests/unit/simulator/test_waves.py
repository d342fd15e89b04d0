"""Plans with waves, simulated: an iteration takes what its plan predicts."""

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.simulator.simulation import Simulator
from megatron.hydraulis.simulator.stage_costs import StageCosts
from megatron.hydraulis.simulator.work import IterationWork
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel


def times(scheme: Scheme) -> Coefficients:
    """Wider groups communicate more."""
    return Coefficients(2e-3 / scheme.cp, 0.5 / scheme.cp + 0.05 * scheme.cp, 2.0 * scheme.cp)


@pytest.mark.parametrize("text", ["cp4~", "cp2~pp2", "2*cp2~"])
def test_an_iteration_takes_what_the_plan_predicts(text: str) -> None:
    strategy = Strategy.parse(text, 4)
    model = TableCostModel(default_limit=512, times=times)
    lengths = [300, 20, 20, 35, 64, 120, 5, 5, 7, 9, 11, 200, 90, 80, 30]
    plan = CertifiedPlanner(Pool.of(strategy), model).plan(lengths)
    assert any(m.groups for replica in plan.replicas for m in replica.micro_batches)
    (iteration,) = Simulator(StageCosts(model)).run([IterationWork.of_plan(plan, strategy)])
    assert iteration.end_ms == pytest.approx(plan.makespan_s * 1e3)
