"""Plans for cp ranks keep their limits with the padding of every sequence."""

import numpy as np
import pytest

from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel

LIMIT = 96
MODEL = TableCostModel(
    limits={(tp, cp, pp): LIMIT for tp in (1, 2) for cp in (1, 2, 4) for pp in (1, 2)}
)


@pytest.mark.parametrize("planner", [GreedyPlanner, CertifiedPlanner])
@pytest.mark.parametrize("text", ["cp4pp2", "tp2cp2+cp2+2*tp1", "2*cp2pp2", "cp4~+cp4"])
def test_rows_with_padding_keep_the_limit(planner: type[GreedyPlanner], text: str) -> None:
    num_ranks = 8
    strategy = Strategy.parse(text, num_ranks)
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(1, 20, size=40).tolist(), 96, 95, 1, 1, 1]
    plan = planner(Pool.of(strategy), MODEL).plan(lengths)
    plan.validate(lengths, strategy, MODEL.max_tokens)
    rows = [
        (scheme.row_tokens(share.lengths), share.num_tokens)
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
        for scheme, share in replica.shares(micro_batch)
        if scheme.cp > 1
    ]
    assert max(padded for padded, _ in rows) <= LIMIT
    # Rows are not left half empty for it.
    assert sum(padded for padded, _ in rows) > 0.6 * LIMIT * len(rows)
    for report in (plan.dispatch, plan.packing):
        assert report is not None
        assert report.objective_s == pytest.approx(plan.makespan_s)
        assert "Error" not in report.status


def test_a_limit_that_rows_cannot_fill_holds_less() -> None:
    """14 tokens on cp4 would be padded to 16."""
    model = TableCostModel(limits={(1, 4, 1): 15})
    strategy = Strategy.parse("cp4", 4)
    assert model.max_tokens(Scheme(cp=4)) == 15
    with pytest.raises(Exception, match="limit, in strategy 'cp4', is 8"):
        GreedyPlanner(Pool.of(strategy), model).plan([14])
    GreedyPlanner(Pool.of(strategy), model).plan([8, 7, 1])
