"""Plans of a few sequences against the best of all plans."""

import pytest

from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.brute_force import ReplicaFigures, best_makespan_ms
from tests.support.planning import TableCostModel

FIGURES = {
    "pp4": ReplicaFigures(1e-3, 0.3, 5.0, 120, num_stages=4),
    "tp2": ReplicaFigures(2e-3, 0.4, 8.0, 60),
    "tp1": ReplicaFigures(4e-3, 0.9, 4.0, 30),
}


def coefficients(scheme: Scheme) -> Coefficients:
    figures = FIGURES[str(scheme)]
    return Coefficients(figures.a_ms_per_token2, figures.b_ms_per_token, figures.c_ms)


MODEL = TableCostModel(limits={(1, 1, 4): 120, (2, 1, 1): 60, (1, 1, 1): 30}, times=coefficients)


@pytest.mark.parametrize(
    ("lengths", "text", "num_ranks"),
    [
        ([25], "pp4+tp2+tp1", 7),
        ([60, 59, 58, 7, 1], "pp4", 4),
        ([60, 30, 30, 20, 20, 10, 5], "pp4+tp2+tp1", 7),
        ([20] * 8, "3*tp2", 6),
        # The pipeline alone holds the first.
        ([100, 30, 30, 30, 12, 3], "pp4+2*tp1", 6),
        # Far more replicas than sequences.
        ([20, 20, 20], "tp2+500*tp1", 502),
    ],
)
def test_the_best_plan_of_a_tiny_batch_is_found(
    lengths: list[int], text: str, num_ranks: int
) -> None:
    plan = CertifiedPlanner(Pool.of(Strategy.parse(text, num_ranks)), MODEL).plan(lengths)
    replicas = [FIGURES[str(replica.scheme)] for replica in plan.replicas]
    # No more of a kind than sequences can make a difference.
    best_ms = best_makespan_ms(lengths, replicas[:4])
    times_ms = [
        pipeline_time_ms(replica.times_ms(coefficients), replica.scheme.pp)
        for replica in plan.replicas
    ]
    assert max(times_ms) == pytest.approx(best_ms)
    assert plan.dispatch is not None
    assert 1e3 * plan.dispatch.bound_s <= best_ms * (1 + 1e-9)
