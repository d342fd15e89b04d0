"""Context parallelism in the training program: losses, plans and log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.hydraulis.observability.trace import read_trace
from megatron.hydraulis.planner.plan import IterationPlan
from tests.support.training_log import validation_losses
from tests.support.training_run import MAIN_FLAGS, ROUNDING, Launch, Run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def context_run(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Strategies with cp, with cp and a pipeline, with waves, and without cp."""
    strategies = {"ring": "tp2cp2", "mixed": "cp2+pp2", "short": "4*tp1", "waves": "cp2~pp2"}
    pool = tmp_path_factory.mktemp("pool") / "pool.json"
    entries = [{"name": name, "replicas": text} for name, text in strategies.items()]
    pool.write_text(json.dumps({"num_ranks": 4, "ranks_per_node": 4, "strategies": entries}))
    schedule = ("--strategy-schedule", ",".join(strategies))
    trace = ("--trace", str(pool.parent / "trace"))
    return launch(None, 4, "--strategy-pool", str(pool), *schedule, *trace, *MAIN_FLAGS)


def test_losses_are_those_without_context_parallelism(context_run: Run, main_run: Run) -> None:
    assert context_run.losses == pytest.approx(main_run.losses, rel=ROUNDING)
    assert [r.grad_norm for r in context_run.records] == pytest.approx(
        [r.grad_norm for r in main_run.records], rel=20 * ROUNDING
    )
    validated, expected = (validation_losses(run.outcome.stdout) for run in (context_run, main_run))
    assert validated == pytest.approx(expected, rel=ROUNDING)


def test_waves_are_planned_and_logged(context_run: Run) -> None:
    ring, mixed, short, waves = context_run.plans
    assert [plan.strategy for plan in context_run.plans] == ["ring", "mixed", "short", "waves"]
    (replica,) = waves.replicas
    assert any(len(micro_batch.groups) == 2 for micro_batch in replica.micro_batches)
    for plan in (ring, mixed, short):
        assert not any(m.groups for replica in plan.replicas for m in replica.micro_batches)
    log = context_run.outcome.ranks[0].stdout + context_run.outcome.ranks[0].stderr
    # Two more: the rank alone, and all ranks for regrouping.
    (num_groups,) = re.findall(r"process groups after strategy 'cp2~pp2': (\d+)", log)
    assert (
        int(num_groups)
        == len({ranks for plan in context_run.plans for ranks in _groups_of(plan)}) + 2
    )


def _groups_of(plan: IterationPlan) -> set[tuple[int, ...]]:
    """Groups of more than one rank that the replicas need."""
    groups = set()
    for planned in plan.replicas:
        replica, scheme = planned.replica, planned.scheme
        for cp in range(scheme.cp):
            groups |= {replica.tp_ranks(stage, cp) for stage in range(scheme.pp)}
            groups |= {replica.pp_ranks(cp, tp) for tp in range(scheme.tp)}
        for stage in range(scheme.pp):
            groups |= {replica.cp_ranks(stage, tp) for tp in range(scheme.tp)}
    return {ranks for ranks in groups if len(ranks) > 1}


def test_padding_is_what_the_rows_need(context_run: Run) -> None:
    for plan, record in zip(context_run.plans, context_run.records, strict=True):
        rows = [
            (scheme.row_tokens(share.lengths), share.num_tokens)
            for replica in plan.replicas
            for micro_batch in replica.micro_batches
            for scheme, share in replica.shares(micro_batch)
        ]
        num_tokens = sum(count for _, count in rows)
        assert record.num_tokens == num_tokens
        assert record.num_padding == pytest.approx(sum(row for row, _ in rows) - num_tokens)
    assert context_run.records[0].num_padding > 0


def test_measured_and_planned_spans_are_of_the_same_micro_batches(context_run: Run) -> None:
    waves = context_run.plans[3]
    (replica,) = waves.replicas
    folder = context_run.argv[context_run.argv.index("--trace") + 1]
    spans = read_trace(Path(folder) / "trace.json").where(iteration=4)
    for rank in range(4):
        own = spans.where(rank=rank)
        position = replica.replica.position_of(rank)
        assert position is not None
        shares = [batch.share_of(position.cp, 2) for batch in replica.micro_batches]
        for name in ("forward", "backward"):
            planned = own.where(name=name, is_planned=True)
            assert planned.values("num_tokens") == [share.num_tokens for share in shares]
            assert planned.values("cp") == [share.group.size for share in shares]
            measured = own.where(name=name, is_planned=False)
            assert len(measured) == len(shares)
