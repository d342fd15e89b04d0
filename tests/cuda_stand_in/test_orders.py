"""One order contains the NCCL calls of all ranks: strategies, pools, and two mutations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda_stand_in.lone_ranks import log_of, run_alone
from tests.cuda_stand_in.order import check_order, read_log
from tests.cuda_stand_in.orders import (
    FIRST_STAGE_BEFORE_ITS_RECEIVE,
    IN_SUITE,
    LATER_STAGE_BEFORE_ITS_SEND,
    MODEL,
    NIGHTLY,
    NUM_ITERATIONS,
    Mutation,
    OrderCase,
    elements_by_call,
    order_of,
    train_and_save,
)
from tests.cuda_stand_in.pool import run_logged
from tests.support.gloo_pool import pool_of

KINDS = {"Send", "Recv"}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in IN_SUITE),
        *(pytest.param(case, id=case.name, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_one_order_contains_all_calls(case: OrderCase, tmp_path: Path) -> None:
    report = order_of(case, tmp_path)
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    assert min(report.num_operations) > 0
    print(f"{case.name}: {case.num_ranks} ranks, {report}")


@pytest.mark.parametrize(
    ("strategy", "num_layers", "least"), [("2*pp4", 16, 3.0), ("2*tp2pp2", 8, 1.8)]
)
def test_calls_carry_what_their_plans_say_and_the_busiest_rank_less_than_alone(
    strategy: str, num_layers: int, least: float, tmp_path: Path
) -> None:
    """Elements by NCCL's calls on all ranks. The busiest rank's, summed over calls, are several
    times fewer than with one bucket in a call."""
    case = OrderCase((strategy,), 8, model=replace(MODEL, num_layers=num_layers))
    (planned,) = run_alone(elements_by_call, case, num_ranks=8, ranks=[0])
    gather, scatter, in_rising_buckets = planned
    order_of(case, tmp_path)
    by_rank = []
    for rank in range(8):
        log = read_log(log_of(tmp_path, rank))
        messages = [
            Counter({kind: sum(c.count for c in calls if c.kind == kind) for kind in KINDS})
            for calls in (operation.calls for operation in log.operations)
            if {call.kind for call in calls} <= KINDS
            and all(log.sizes[call.communicator] == 8 for call in calls)
        ]
        by_rank.append([max(count.values()) for count in messages])
    busiest = [max(of_call) for of_call in zip(*by_rank, strict=True)]
    # The next strategy is known: the last update is followed by a gather, too.
    assert busiest == gather + (scatter + gather) * NUM_ITERATIONS
    assert in_rising_buckets >= least * sum(gather + scatter)


def test_while_a_checkpoint_is_being_saved(tmp_path: Path) -> None:
    """The ranks have peers, as they vote on whether all have written."""
    pool_of(4, "cuda").run(run_logged, tmp_path, train_and_save, str(tmp_path / "checkpoints"))
    report = check_order([read_log(log_of(tmp_path, rank)) for rank in range(4)])
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    assert list((tmp_path / "checkpoints").glob("iter_*"))


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(FIRST_STAGE_BEFORE_ITS_RECEIVE, id="a first stage before its receive"),
        pytest.param(LATER_STAGE_BEFORE_ITS_SEND, id="a later stage before its send"),
    ],
)
def test_ranks_that_scatter_too_early_wait_for_one_another(
    mutation: Mutation, tmp_path: Path
) -> None:
    """The message of the last backward on one side, a scatter on the other."""
    report = order_of(IN_SUITE[0], tmp_path, mutation)
    assert not report.mismatches
    assert len(report.cycle) == 2, str(report)
    kinds = {frozenset(call.kind for call in wait.operation.calls) for wait in report.cycle}
    assert kinds & {frozenset({"Send"}), frozenset({"Recv"})}, str(report)
    assert all("in tp2pp2, forward-backward" in wait.operation.phase for wait in report.cycle)
