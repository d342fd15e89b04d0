"""The checker against the planner's recurrence, brute force and linear programs."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron.hydraulis.cost_model import ProfileCostModel, pipeline_time_ms
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.plan_check.files import (
    SchemeFigures,
    read_lengths,
    read_plan,
    read_pool,
    read_strategy,
)
from megatron.hydraulis.plan_check.rules import (
    check_plan,
    proved_packing_bound_ms,
    proved_strategy_bound_ms,
    simulated_time_ms,
)
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

TIMES = st.lists(st.floats(0.0, 50.0), max_size=9)


@given(TIMES, st.integers(1, 6), st.sampled_from([0.2, 1 / 3, 0.5]))
def test_simulation_agrees_with_the_recurrence(
    times_ms: list[float], num_stages: int, forward_share: float
) -> None:
    assert simulated_time_ms(times_ms, num_stages, forward_share) == pytest.approx(
        pipeline_time_ms(times_ms, num_stages, forward_share=forward_share)
    )


def test_the_example_of_the_documents() -> None:
    assert simulated_time_ms([4, 1, 4], 2) == pytest.approx(16.0)
    assert simulated_time_ms([3, 3, 3, 3], 3) == pytest.approx((4 + 2) * 3)
    assert simulated_time_ms([], 4) == 0.0


SCHEMES = st.builds(Scheme, tp=st.integers(1, 6), cp=st.integers(1, 3), pp=st.integers(1, 3))


@given(st.lists(SCHEMES, min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 8))
def test_strategies_are_placed_as_the_planner_places_them(
    schemes: list[Scheme], num_idle: int, ranks_per_node: int
) -> None:
    num_used = sum(scheme.num_ranks for scheme in schemes)
    num_ranks = -(-(num_used + num_idle) // ranks_per_node) * ranks_per_node
    num_idle = num_ranks - num_used
    terms = [*map(str, schemes), *([f"{num_idle}*idle"] if num_idle else [])]
    planned = Strategy.parse("+".join(terms), num_ranks, ranks_per_node=ranks_per_node)
    read = read_strategy("+".join(terms), num_ranks, ranks_per_node)
    assert [ranks for _, ranks in read] == [list(r.ranks) for r in planned.replicas]
    # Its full notation, with '@' if needed, is the same strategy.
    assert read_strategy(str(planned), num_ranks, ranks_per_node) == read


def scheme_figures() -> st.SearchStrategy[SchemeFigures]:
    return st.builds(
        SchemeFigures,
        a_ms_per_token2=st.sampled_from([0.0, 1e-3, 0.05]),
        b_ms_per_token=st.sampled_from([0.1, 0.4, 1.0]),
        c_ms=st.sampled_from([0.0, 2.0, 15.0]),
        max_tokens=st.sampled_from([12, 25, 60]),
        num_stages=st.integers(1, 3),
        window_tokens=st.sampled_from([1, 5]),
        windowed_share=st.sampled_from([0.0, 0.5, 1.0]),
    )


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for index, part in enumerate(smaller):
            yield [*smaller[:index], [items[0], *part], *smaller[index + 1 :]]


def best_packing_ms(lengths: list[int], figures: SchemeFigures) -> float:
    """The least time of all packings and all orders."""
    return min(
        (
            pipeline_time_ms([figures.time_ms(part) for part in order], figures.num_stages)
            for parts in partitions(lengths)
            if all(sum(part) <= figures.max_tokens for part in parts)
            for order in itertools.permutations(parts)
        ),
        default=math.inf,
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), scheme_figures())
def test_no_packing_is_below_its_bound(lengths: list[int], figures: SchemeFigures) -> None:
    best_ms = best_packing_ms(lengths, figures)
    assert proved_packing_bound_ms(lengths, figures) <= best_ms * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=4),
    st.lists(scheme_figures(), min_size=1, max_size=3),
)
def test_no_plan_is_below_the_bound_of_its_strategy(
    lengths: list[int], replicas: list[SchemeFigures]
) -> None:
    best_ms = math.inf
    for places in itertools.product(range(len(replicas)), repeat=len(lengths)):
        shares: list[list[int]] = [[] for _ in replicas]
        for length, place in zip(lengths, places, strict=True):
            shares[place].append(length)
        best_ms = min(best_ms, max(map(best_packing_ms, shares, replicas)))
    bound_ms = proved_strategy_bound_ms(lengths, replicas)
    assert bound_ms <= best_ms * (1 + 1e-9)
    assert math.isinf(bound_ms) == math.isinf(best_ms)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=40),
    st.lists(scheme_figures(), min_size=1, max_size=4),
)
def test_weights_are_nearly_the_best(lengths: list[int], replicas: list[SchemeFigures]) -> None:
    """Compared with the fractional relaxation with every replica in use, an upper limit."""
    replicas = [figures for figures in replicas if figures.max_tokens >= max(lengths)]
    if len(replicas) < 1:
        return
    num_columns = len(lengths) * len(replicas) + 1
    work, equal = np.zeros((len(replicas), num_columns)), np.zeros((len(lengths), num_columns))
    for r, figures in enumerate(replicas):
        for i, length in enumerate(lengths):
            share_ms = figures.c_ms * length / figures.max_tokens
            work[r, r * len(lengths) + i] = figures.time_ms([length]) - figures.c_ms + share_ms
            equal[i, r * len(lengths) + i] = 1.0
        work[r, -1] = -1.0
    answer = linprog(
        [0.0] * (num_columns - 1) + [1.0],
        A_ub=work,
        b_ub=np.zeros(len(replicas)),
        A_eq=equal,
        b_eq=np.ones(len(lengths)),
    )
    # Only fills and single sequences raise the bound above that of the relaxation without them.
    assert proved_strategy_bound_ms(lengths, replicas) >= answer.fun * 0.98


COEFFICIENTS = {"a_ms_per_token2": 1e-3, "b_ms_per_token": 0.3, "c_ms": 4.0}
PROFILE = {
    "device": "imagined",
    "source": "made for tests",
    "date": "2026-01-01",
    "schemes": [
        {"tp": tp, "cp": cp, "pp": pp, **COEFFICIENTS, "max_tokens": limit}
        for tp, cp, pp, limit in (
            (1, 1, 1, 45), (2, 1, 1, 100), (1, 1, 2, 60), (1, 2, 1, 90), (1, 4, 1, 190)
        )
    ],
}  # fmt: skip
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "gated_mlp": True,
    "tied_embeddings": False,
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 45), min_size=1, max_size=14),
    st.sampled_from(["4*tp1", "tp2+2*tp1", "pp2+2*tp1", "cp2+tp2", "cp4~", "cp2~+2*tp1"]),
    st.sampled_from([2, 7, 16, 64, 1000]),
    st.booleans(),
    st.sampled_from([{}, {"num_windowed_layers": 3, "window_tokens": 10}]),
)
def test_plans_with_a_row_quantum_are_valid(
    lengths: list[int], text: str, quantum: int, is_greedy: bool, window: dict[str, int]
) -> None:
    profile = PROFILE | {"model": MODEL | window}
    strategy = {"name": "only", "replicas": text}
    files: dict[str, Any] = {
        "pool": {"num_ranks": 4, "ranks_per_node": 4, "strategies": [strategy]},
        "profile": profile,
        "lengths": lengths,
    }
    pool = Pool.from_json(files["pool"])
    limits = Limits(ProfileCostModel.from_json(profile, what="profile"), row_quantum=quantum)
    planner = (GreedyPlanner if is_greedy else CertifiedPlanner)(pool, limits.cost_model, limits)
    plan = planner.plan(lengths)
    assert plan.dispatch is not None
    assert "greedy: " not in plan.dispatch.status
    files["plan"] = plan.to_json()
    with TemporaryDirectory() as folder:
        paths = {name: str(Path(folder, f"{name}.json")) for name in files}
        for name, content in files.items():
            Path(paths[name]).write_text(json.dumps(content))
        figures = read_pool(paths["pool"], paths["profile"])
        check_plan(read_plan(paths["plan"]), read_lengths(paths["lengths"]), figures)
    for replica in plan.replicas:
        for micro_batch in replica.micro_batches:
            for scheme, share in replica.shares(micro_batch):
                row, needed = share.row_tokens, scheme.row_tokens(share.lengths)
                limit = scheme.rounded_down(limits.max_tokens(pool.strategies[0], scheme))
                assert row is not None
                multiple = math.lcm(quantum, scheme.token_quantum)
                # Rounded up by less than a quantum, or at the limit.
                assert row - needed < multiple
                assert row % multiple == 0 or row == max(limit, needed)
    assert IterationPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
