"""Plans keep the rules of the oracle, which finds every kind of damage."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import ProfileCostModel, pipeline_time_ms
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool
from tests.support.plan_oracle import BrokenRuleError, Content, check_plan, simulated_time_ms
from tests.support.planning_files import LENGTHS, POOL, PROFILE, make_plan

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


MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "gated_mlp": True,
    "tied_embeddings": False,
}
ROWS = [
    {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "max_tokens": limit,
        "a_ms_per_token2": 1e-3,
        "b_ms_per_token": 0.3,
        "c_ms": 4.0,
    }
    for tp, cp, pp, limit in (
        *((1, 1, 1, 45), (2, 1, 1, 100), (1, 1, 2, 60)),
        *((1, 2, 1, 90), (1, 4, 1, 190)),
    )
]
ROWS += [
    ROWS[place] | marks | {"max_tokens": limit, "b_ms_per_token": 0.4}
    for place, limit, marks in (
        *((0, 50, {"fs": 4}), (3, 110, {"fs": 4}), (4, 230, {"fs": 4})),
        *((1, 170, {"recomputes": True}), (2, 90, {"recomputes": True})),
    )
]


FORMS = [
    {"a_ms_per_token2": a, "b_ms_per_token": b, "c_ms": c}
    for a, b, c in ((0.02, 0.1, 4.0), (0.0, 0.4, 3.0))
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 45), min_size=1, max_size=14),
    st.sampled_from(
        [
            "4*tp1",
            "tp2+2*tp1",
            "pp2+2*tp1",
            "cp2+tp2",
            "cp4~",
            "cp2~+2*tp1",
            "cp4~fs",
            "tp2r+2*tp1",
            "tp2r+tp2",
            "pp2r+pp2",
        ]
    ),
    st.sampled_from([1, 2, 7, 16, 64, 1000]),
    st.booleans(),
    st.sampled_from([{}, {"num_windowed_layers": 3, "window_tokens": 10}]),
    st.sampled_from([{}, {"forms": FORMS}, {"forms": FORMS[:1], "host_ms": 9.0}]),
)
def test_plans_are_valid_with_every_row_quantum(
    lengths: list[int],
    text: str,
    quantum: int,
    is_greedy: bool,
    window: dict[str, int],
    more: dict[str, Any],
) -> None:
    rows = [row | more for row in ROWS]
    profile = PROFILE | {"version": 2, "model": MODEL | window, "schemes": rows, "strategies": []}
    strategies = [{"name": "only", "replicas": text}]
    pool = Pool.from_json({"num_ranks": 4, "ranks_per_node": 4, "strategies": strategies})
    limits = Limits(ProfileCostModel.from_json(profile, what="profile"), row_quantum=quantum)
    planner = (GreedyPlanner if is_greedy else CertifiedPlanner)(pool, limits.cost_model, limits)
    plan = planner.plan(lengths)
    assert plan.dispatch is not None
    assert "greedy: " not in plan.dispatch.status
    check_plan(plan.to_json(), lengths, pool.to_json(), profile)
    for replica in plan.replicas:
        for micro_batch in replica.micro_batches:
            for scheme, share in replica.shares(micro_batch):
                row, needed = share.row_tokens, scheme.row_tokens(share.lengths)
                if row is None:
                    assert quantum == 1
                    continue
                limit = scheme.rounded_down(limits.max_tokens(pool.strategies[0], scheme))
                multiple = math.lcm(quantum, scheme.token_quantum)
                # Rounded up by less than a quantum, or at the limit.
                assert row - needed < multiple
                assert row % multiple == 0 or row == max(limit, needed)
    assert IterationPlan.from_json(plan.to_json()) == plan


def test_a_plan_is_valid() -> None:
    check_plan(make_plan(), LENGTHS, POOL, PROFILE)


def batches(plan: Content, replica: int) -> list[Content]:
    """The micro-batches of a replica."""
    found: list[Content] = plan["replicas"][replica]["micro_batches"]
    return found


def too_many_tokens(plan: Content) -> None:
    first, second = batches(plan, 1)[:2]
    first["sequences"] += second["sequences"]
    first["lengths"] += second["lengths"]
    del batches(plan, 1)[1]


def other_order(plan: Content) -> None:
    # Work was in falling order; with the largest in the middle it takes longer.
    order = sorted(batches(plan, 1), key=lambda batch: sum(batch["lengths"]))
    plan["replicas"][1]["micro_batches"] = [order[0], *order[2:], order[1]]


def no_overhead(plan: Content) -> None:
    plan["predicted_time_s"] = max(r["predicted_time_s"] for r in plan["replicas"])


def other_length(plan: Content) -> None:
    batches(plan, 0)[-1]["lengths"][0] -= 1


def repeated_sequence(plan: Content) -> None:
    batches(plan, 0).append(copy.deepcopy(batches(plan, 1)[0]))


def with_rows(*rows: int) -> Callable[[Content], None]:
    """The first micro-batch, of 3000 tokens on tp4, lists these rows."""
    return lambda plan: batches(plan, 0)[0].update(rows=list(rows))


def with_stage(stage: str, **factors: float) -> Callable[[Content], None]:
    """Other claims of a stage."""

    def damage(plan: Content) -> None:
        for name, factor in factors.items():
            plan[stage][name] *= factor

    return damage


DAMAGES: dict[str, tuple[str, Callable[[Content], Any]]] = {
    "a replica is left out": ("replicas", lambda plan: plan["replicas"].pop()),
    "another scheme": ("replicas", lambda plan: plan["replicas"][1]["scheme"].update(pp=1)),
    "other ranks": ("replicas", lambda plan: plan["replicas"][0]["ranks"].reverse()),
    "an empty micro-batch": (
        "empty",
        lambda plan: batches(plan, 0).append({"sequences": [], "lengths": []}),
    ),
    "a missing sequence": ("sequences", lambda plan: batches(plan, 1).pop()),
    "a repeated sequence": ("sequences", repeated_sequence),
    "another length": ("lengths", other_length),
    "too few ids": ("ids", lambda plan: plan.update(sequence_ids=[0])),
    "groups without ~": ("groups", lambda plan: batches(plan, 1)[0].update(groups=[[0, 1, 1]])),
    "two rows without groups": ("rows", with_rows(3000, 3000)),
    "a short row": ("rows", with_rows(100)),
    "a row that tp does not divide": ("rows", with_rows(3999)),
    "a row above the limit": ("limit of 4000", with_rows(4004)),
    "too many tokens": ("limit of 900", too_many_tokens),
    "padding that takes no time": ("replica time", with_rows(4000)),
    "another order": ("replica time", other_order),
    "no overhead": ("iteration time", no_overhead),
    "another objective": ("objective", with_stage("dispatch", objective_s=1.01)),
    "a bound above the plan": ("bound", with_stage("packing", bound_s=2.0, gap=0.0)),
    "a flattering gap": ("gap", with_stage("dispatch", gap=0.5)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found(what: str) -> None:
    rule, damage = DAMAGES[what]
    plan = make_plan()
    damage(plan)
    with pytest.raises(BrokenRuleError, match=rule):
        check_plan(plan, LENGTHS, POOL, PROFILE)


WAVE_LENGTHS = [100, 10, 30, 31]
WAVE_PROFILE: Content = {
    **PROFILE,
    "strategies": [],
    "schemes": [
        {
            "tp": 1,
            "cp": cp,
            "pp": 2,
            "max_tokens": 32 * cp,
            "a_ms_per_token2": 0.01 / cp,
            "b_ms_per_token": 0.2 / cp + 0.01 * cp,
            "c_ms": float(cp),
        }
        for cp in (1, 2, 4)
    ],
}


def waves(*groups: list[int]) -> Content:
    """100 tokens on all cp ranks; then a wave in groups."""

    def time_ms(cp: int, lengths: list[int]) -> float:
        squares, tokens = sum(length**2 for length in lengths), sum(lengths)
        return 0.01 / cp * squares + (0.2 / cp + 0.01 * cp) * tokens + cp

    wave_ms = max(time_ms(2, [10, 30]), time_ms(1, [31]))
    time_s = pipeline_time_ms([time_ms(4, [100]), wave_ms], 2) / 1e3
    micro_batches = [
        {"sequences": [0], "lengths": [100]},
        {"sequences": [1, 2, 3], "lengths": [10, 30, 31], "groups": list(groups)},
    ]
    replica = {
        "scheme": {"tp": 1, "cp": 4, "pp": 2, "splits_cp": True},
        "ranks": list(range(8)),
        "predicted_time_s": time_s,
        "micro_batches": micro_batches,
    }
    return {
        "strategy": "waves",
        "predicted_time_s": time_s,
        "replicas": [replica],
        "dispatch": None,
        "packing": None,
    }


@pytest.mark.parametrize(
    ("groups", "limit", "rule"),
    [
        ([[0, 2, 2], [2, 1, 1], [3, 1, 0]], None, None),
        ([[0, 2, 2], [2, 1, 1]], None, "groups"),
        ([[0, 1, 1], [1, 2, 1], [3, 1, 1]], None, "groups"),
        ([[0, 2, 2], [2, 2, 0]], None, "groups"),
        ([[0, 2, 1], [0, 2, 2]], None, "groups"),
        ([[0, 3, 2], [3, 1, 1]], None, "groups"),
        # 10 and 30 on one cp rank, which holds 32.
        ([[0, 1, 2], [1, 1, 1], [2, 2, 0]], None, "limit of 32 tokens but 40"),
        # Another way to group takes another time.
        ([[0, 2, 2], [2, 2, 1]], None, "replica time"),
        # 100 tokens on 4 ranks are 104.
        ([[0, 2, 2], [2, 1, 1], [3, 1, 0]], 103, "limit of 103 tokens but 104"),
        # A rank may hold a quarter of the strategy's own limit.
        ([[0, 2, 2], [2, 1, 1], [3, 1, 0]], 123, "limit of 30 tokens but 31"),
    ],
)
def test_waves_are_checked(groups: list[list[int]], limit: int | None, rule: str | None) -> None:
    strategy: Content = {"name": "waves", "replicas": "cp4~pp2"}
    if limit is not None:
        strategy["max_tokens"] = {"cp4~pp2": limit}
    pool = {"num_ranks": 8, "ranks_per_node": 8, "strategies": [strategy]}
    plan = waves(*groups)
    if rule is None:
        check_plan(plan, WAVE_LENGTHS, pool, WAVE_PROFILE)
        return
    with pytest.raises(BrokenRuleError, match=rule):
        check_plan(plan, WAVE_LENGTHS, pool, WAVE_PROFILE)


def test_groups_of_a_size_that_was_not_measured_are_not_planned() -> None:
    profile = copy.deepcopy(WAVE_PROFILE)
    profile["schemes"][2]["c_ms"] = 40.0  # so that narrow groups are worthwhile
    del profile["schemes"][1]
    strategies = [{"name": "waves", "replicas": "cp4~pp2"}]
    pool = {"num_ranks": 8, "ranks_per_node": 8, "strategies": strategies}
    cost_model = ProfileCostModel.from_json(profile, what="profile")
    plan = CertifiedPlanner(Pool.from_json(pool), cost_model).plan(WAVE_LENGTHS)
    assert {g.size for m in plan.replicas[0].micro_batches for g in m.groups} == {1}
    check_plan(plan.to_json(), WAVE_LENGTHS, pool, profile)
