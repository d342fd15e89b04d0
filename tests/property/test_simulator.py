"""The event loop against recurrences, for micro-batches and stages of random times."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.interface import FORWARD_SHARE
from megatron.hydraulis.cost_model.pipeline import StageCosts, pipeline_time_ms
from megatron.hydraulis.cost_model.regrouping import Hiding
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.simulator.simulation import Simulator
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Strategy
from tests.support.planning import TableCostModel
from tests.support.simulation import (
    ONE_MS_A_TOKEN,
    SMALL_SHAPE,
    checked_account,
    regroup_costs,
    simulator,
    work_of,
)

TOKENS = st.lists(st.integers(1, 50), min_size=0, max_size=9)


@settings(max_examples=150, deadline=None)
@given(tokens=TOKENS, num_stages=st.integers(1, 5), host_ms=st.sampled_from((0.0, 15.0, 60.0)))
def test_equal_stages_take_the_exact_time_of_1f1b_or_of_the_host(
    tokens: list[int], num_stages: int, host_ms: float
) -> None:
    work = work_of(f"pp{num_stages}", [tokens], num_ranks=num_stages)
    times = replace(ONE_MS_A_TOKEN, host_ms=host_ms)
    replica_ms = max(pipeline_time_ms(tokens, num_stages), len(tokens) * host_ms)
    assert work.makespan_ms(TableCostModel(times=lambda _: times)) == pytest.approx(replica_ms)
    ended_ms = 0.0
    for iteration in simulator(times=times).run([work] * 2):
        result = checked_account(iteration, started_ms=ended_ms)
        assert result.time_ms == pytest.approx(replica_ms, rel=1e-9, abs=1e-9)
        ended_ms = iteration.end_ms


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    layers=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_unequal_stages_agree_with_the_longest_chain_of_operations(
    tokens: list[int], layers: list[int]
) -> None:
    shape = ModelShape(
        num_layers=sum(layers),
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        vocab_size=640,
        gated_mlp=True,
        tied_embeddings=False,
    )
    num_stages = len(layers)
    text = f"pp{num_stages}:{','.join(map(str, layers))}" if num_stages > 1 else "tp1"
    strategy = Strategy.parse(text, num_stages)
    costs = StageCosts(TableCostModel(times=lambda _: Coefficients(0.01, 1.0, 2.0)), shape)
    batches = tuple(MicroBatchWork.packed([num]) for num in tokens)
    (iteration,) = Simulator(costs).run([IterationWork(strategy, (batches,))])
    coefficients = costs.coefficients(strategy.replicas[0].scheme)
    times_ms = [[batch.time_ms(each) for batch in batches] for each in coefficients]
    assert iteration.end_ms == pytest.approx(longest_chain_ms(times_ms), rel=1e-9)


def longest_chain_ms(times_ms: list[list[float]]) -> float:
    """1F1B as a graph: nodes are operations, an edge leads to an operation that must end before."""
    num_stages, num_batches = len(times_ms), len(times_ms[0])
    previous: dict[tuple[str, int, int], tuple[str, int, int] | None] = {}
    for stage in range(num_stages):
        num_ahead = min(num_stages - 1 - stage, num_batches)
        order = [("F", stage, k) for k in range(num_ahead)]
        for k in range(num_batches):
            order += [("F", stage, num_ahead + k)] if num_ahead + k < num_batches else []
            order.append(("B", stage, k))
        previous |= dict(zip(order, [None, *order], strict=False))
    ends: dict[tuple[str, int, int], float] = {}

    def end_ms(node: tuple[str, int, int]) -> float:
        if node not in ends:
            kind, stage, k = node
            share = FORWARD_SHARE if kind == "F" else 1.0 - FORWARD_SHARE
            neighbour = (kind, stage - 1 if kind == "F" else stage + 1, k)
            before = [previous[node], neighbour if neighbour in previous else None]
            start_ms = max((end_ms(each) for each in before if each is not None), default=0.0)
            ends[node] = start_ms + share * times_ms[stage][k]
        return ends[node]

    return max(end_ms(node) for node in previous)


@settings(max_examples=80, deadline=None)
@given(
    replicas=st.tuples(TOKENS, TOKENS, TOKENS),
    plan_time_s=st.floats(0.0, 0.2),
    plan_ahead=st.integers(0, 3),
    regroups=st.booleans(),
    hiding=st.sampled_from(Hiding),
)
def test_busy_and_idle_times_add_up(
    replicas: tuple[list[int], ...],
    plan_time_s: float,
    plan_ahead: int,
    regroups: bool,
    hiding: Hiding,
) -> None:
    work = work_of("tp2+pp2+2*tp1+2*idle", [*replicas, []], num_ranks=8, plan_time_s=plan_time_s)
    run = simulator(
        regroup=regroup_costs(8, hiding=hiding) if regroups else None,
        shape=SMALL_SHAPE if regroups else None,
        plan_ahead=plan_ahead,
    )
    ended_ms = 0.0
    for iteration in run.run([work] * 3):
        result = checked_account(iteration, started_ms=ended_ms)
        if not regroups:  # with the model's layers, one stage has less to do
            # Every token takes 1 ms on each rank of a replica.
            work_ms = 2 * sum(replicas[0]) + 2 * sum(replicas[1]) + sum(replicas[2])
            assert result.work_ms == pytest.approx(work_ms)
        parts = (
            result.fill_ms,
            result.parameters_ms,
            result.imbalance_ms,
            result.regroup_ms,
            result.planning_ms,
        )
        assert min(parts) > -1e-6
        ended_ms = iteration.end_ms
