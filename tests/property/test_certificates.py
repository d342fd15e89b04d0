"""Bounds and plans against the optimum: no bound is above it, no plan below it."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.planner.bounds import (
    dispatch_bound_ms,
    fewest_micro_batches,
    packing_bound_ms,
    replica_bound_ms,
)
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import longest_first
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.search import TARGET_GAP, StrategySearch
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.brute_force import (
    ReplicaFigures,
    best_makespan_ms,
    best_replica_time_ms,
    best_replica_times_ms,
)
from tests.support.planning import TableCostModel

# Sums of floats taken in different orders.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Instance:
    """A batch and replicas, at least one of which holds the longest sequence."""

    lengths: list[int]
    replicas: list[ReplicaFigures]

    @property
    def costs(self) -> list[SchemeCost]:
        return [scheme_cost(figures) for figures in self.replicas]

    @property
    def optimum_ms(self) -> float:
        return best_makespan_ms(self.lengths, self.replicas)

    def relaxation(self, num_buckets: int = 32) -> Relaxation:
        return Relaxation(
            ReplicaClass.of(self.costs),
            sorted(self.lengths),
            num_buckets=num_buckets,
            solver=Solver(Deadline(None)),
        )

    def searched(self) -> StrategySearch:
        """The search with its bound raised and its plans improved."""
        schemes = [
            Scheme(pp=figures.num_stages, tp=1, cp=1) for figures in self.replicas
        ]  # Their costs are given separately: only the number of stages must be correct.
        text = "+".join(map(str, schemes))
        strategy = Strategy.parse(text, sum(scheme.num_ranks for scheme in schemes))
        packers = {
            cost: ReplicaPacker(cost, self.lengths, Solver(Deadline(None))) for cost in self.costs
        }
        search = StrategySearch(
            strategy,
            self.costs,
            self.lengths,
            longest_first(self.lengths),
            packers.__getitem__,
            Solver(Deadline(None)),
            overhead_ms=0.0,
        )
        search.start()
        search.raise_bound()
        search.search(Effort(5e7))
        return search


def scheme_cost(figures: ReplicaFigures) -> SchemeCost:
    window = None
    if figures.windowed_share:
        window = AttentionWindow(figures.window_tokens, figures.windowed_share)
    first = Coefficients(
        figures.a_ms_per_token2,
        figures.b_ms_per_token,
        figures.c_ms,
        window,
        figures.forward_share,
    )
    others = tuple(
        replace(first, a_ms_per_token2=a, b_ms_per_token=b, c_ms=c) for a, b, c in figures.others
    )
    coefficients = replace(first, others=others, host_ms=figures.host_ms)
    return SchemeCost(coefficients, figures.max_tokens, figures.num_stages)


def lengths_of(max_size: int) -> st.SearchStrategy[list[int]]:
    """Lengths of all kinds: uniform, long-tailed, nearly equal."""
    return st.one_of(
        st.lists(st.integers(1, 60), min_size=1, max_size=max_size),
        st.lists(st.sampled_from([60, 59, 30, 20, 3]), min_size=1, max_size=max_size),
        st.lists(st.integers(1, 12), min_size=0, max_size=max_size - 1).map(lambda s: [*s, 60]),
    )


WINDOWS = [(0, 0.0), (0, 0.0), (7, 1.0), (25, 0.5), (59, 0.75)]
"""Tokens of a window and the share of layers that have it."""


def figures(num_stages: st.SearchStrategy[int]) -> st.SearchStrategy[ReplicaFigures]:
    """Costs of one to four forms in which any term may be 0; limits around one and two of the
    longest sequences."""
    a_ms, b_ms, c_ms = map(st.sampled_from, ([0.0, 1e-3, 0.05], [0.0, 0.1, 1.0], [0.0, 2.0, 30.0]))
    return st.builds(
        lambda window, **values: ReplicaFigures(
            **values, window_tokens=window[0], windowed_share=window[1]
        ),
        window=st.sampled_from(WINDOWS),
        a_ms_per_token2=a_ms,
        b_ms_per_token=b_ms,
        c_ms=c_ms,
        max_tokens=st.sampled_from([40, 60, 75, 119, 120, 500]),
        num_stages=num_stages,
        forward_share=st.sampled_from([1.0 / 3.0, 1.0 / 3.0, 0.25, 0.5]),
        others=st.just(()) | st.lists(st.tuples(a_ms, b_ms, c_ms), max_size=3).map(tuple),
        host_ms=st.sampled_from([0.0, 0.0, 3.0, 25.0]),
    )


STAGES = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def instances(draw: st.DrawFn, max_sequences: int = 6) -> Instance:
    lengths = draw(lengths_of(max_sequences))
    replicas = draw(st.lists(figures(STAGES), min_size=1, max_size=3))
    if draw(st.booleans()):
        replicas = [replicas[0]] * len(replicas)
    assume(max(lengths) <= max(replica.max_tokens for replica in replicas))
    return Instance(lengths, replicas)


@given(instances())
def test_no_bound_is_above_the_best_plan(instance: Instance) -> None:
    optimum_ms = instance.optimum_ms
    assert dispatch_bound_ms(instance.lengths, instance.costs) <= optimum_ms * (1 + ROUNDING)
    # With few buckets lengths are rounded, as in large batches.
    for num_buckets in (1, 2, 32):
        relaxation = instance.relaxation(num_buckets)
        assert not relaxation.is_impossible(optimum_ms * (1 + ROUNDING))


HOST_ONLY = ReplicaFigures(0.0, 0.0, 0.0, 40, num_stages=2, host_ms=3.0)


@example(Instance([1, 1, 39], [HOST_ONLY]))
@given(instances(max_sequences=7))
def test_search_ends_between_its_bound_and_twice_the_best_plan(instance: Instance) -> None:
    search = instance.searched()
    optimum_ms = instance.optimum_ms
    assert search.bound_ms <= optimum_ms * (1 + ROUNDING)
    assert optimum_ms <= search.found_ms * (1 + ROUNDING)
    # Of 2,500 such batches 98 % got the best plan, 99.7 % one within 1 %, the worst 1.03 times it;
    # of others one got 1.46 times the best.
    assert search.found_ms <= 2.0 * optimum_ms * (1 + ROUNDING)
    candidate = search.candidate()
    assert candidate.makespan_ms == search.found_ms
    for stage in (candidate.dispatch, candidate.packing):
        assert 1e3 * stage.bound_s <= candidate.makespan_ms * (1 + ROUNDING)
    # The gap limits how much better the best plan can be.
    if candidate.dispatch.status == "certified":
        assert optimum_ms >= search.found_ms * (1 - TARGET_GAP) * (1 - ROUNDING)
    assert search.best is not None
    # The bound of packing is valid for the dispatch that was found.
    least_ms = max(
        best_replica_time_ms([instance.lengths[i] for i in share], figures)
        for share, figures in zip(search.best.shares, instance.replicas, strict=True)
    )
    assert 1e3 * candidate.packing.bound_s <= least_ms * (1 + ROUNDING)
    assert least_ms <= candidate.makespan_ms * (1 + ROUNDING)


@settings(max_examples=6)
@given(st.lists(st.integers(1, 60), min_size=8, max_size=8), st.lists(figures(STAGES), max_size=2))
def test_eight_sequences_on_three_replicas(
    lengths: list[int], others: list[ReplicaFigures]
) -> None:
    roomy = ReplicaFigures(1e-3, 0.1, 2.0, 90, num_stages=2)
    instance = Instance(lengths, [roomy, *others])
    optimum_ms = instance.optimum_ms
    search = instance.searched()
    assert search.bound_ms <= optimum_ms * (1 + ROUNDING)
    assert optimum_ms <= search.found_ms * (1 + ROUNDING)
    assert search.found_ms <= 2.0 * optimum_ms * (1 + ROUNDING)


@given(lengths_of(6), figures(st.integers(1, 5)))
def test_no_packing_is_below_the_bound_of_its_replica(
    lengths: list[int], replica: ReplicaFigures
) -> None:
    times_ms = best_replica_times_ms(lengths, replica)
    # All sequences, then shares without some of them.
    for share in {len(times_ms) - 1, len(times_ms) // 2, len(times_ms) * 2 // 3}:
        members = [length for i, length in enumerate(lengths) if share >> i & 1]
        if max(members, default=0) <= replica.max_tokens:
            for bound in (replica_bound_ms, packing_bound_ms):
                bound_ms = bound(members, scheme_cost(replica))
                assert bound_ms <= times_ms[share] * (1 + ROUNDING)


@given(lengths_of(6), st.integers(60, 150), st.integers(0, 60))
def test_fewest_micro_batches(lengths: list[int], max_tokens: int, more_tokens: int) -> None:
    # A packing that costs 1 ms a micro-batch and nothing else.
    counting = ReplicaFigures(0.0, 0.0, 1.0, max_tokens)
    fewest = fewest_micro_batches(lengths, max_tokens)
    assert -(-sum(lengths) // max_tokens) <= fewest <= best_replica_time_ms(lengths, counting)


# A pipeline of four stages that alone holds the three long sequences, two of them in a micro-batch
# if the limit allows. The fill is most of the time, so that two together beat three apart: a bound
# that gives every long sequence its own micro-batch is up to a third too high.
PIPELINE_COEFFICIENTS = [
    (0.0, 0.351375, 234.25),
    (0.0, 0.1, 200.0),
    (0.0, 0.05, 300.0),
    (5e-4, 0.0, 300.0),
    (1e-3, 0.1, 190.0),
    (5e-3, 0.5, 20.0),
    (0.01, 0.0, 0.0),
]


@pytest.mark.parametrize("coefficients", PIPELINE_COEFFICIENTS)
@pytest.mark.parametrize("max_tokens", [(201, 60), (402, 60), (402, 200), (622, 60), (622, 402)])
def test_long_sequences_may_share_a_micro_batch(
    coefficients: tuple[float, float, float], max_tokens: tuple[int, int]
) -> None:
    a, b, c = coefficients
    instance = Instance(
        [201, 201, 200, 20],
        [
            ReplicaFigures(a, b, c, max_tokens[0], num_stages=4),
            ReplicaFigures(a / 2, b / 2, c, max_tokens[1]),
        ],
    )
    optimum_ms = instance.optimum_ms
    relaxation = instance.relaxation()
    assert not relaxation.is_impossible(optimum_ms * (1 + ROUNDING))
    # The bound is not trivial either.
    assert relaxation.is_impossible(optimum_ms * 0.8)


def test_the_plan_that_a_bound_once_excluded() -> None:
    a, b, c = PIPELINE_COEFFICIENTS[0]
    instance = Instance(
        [201, 201, 200, 20],
        [ReplicaFigures(a, b, c, 402, num_stages=4), ReplicaFigures(a, b / 2, c, 200)],
    )
    assert instance.optimum_ms == pytest.approx(1502.0, abs=0.1)
    assert not instance.relaxation().is_impossible(1502.1)
    search = instance.searched()
    assert search.bound_ms <= instance.optimum_ms * (1 + ROUNDING)
    assert search.found_ms == pytest.approx(instance.optimum_ms)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_long", [2, 3, 4, 6])
@pytest.mark.parametrize("c_ms", [0.0, 20.0])
def test_each_pipeline_may_hold_several_long_sequences(
    num_stages: int, num_long: int, c_ms: float
) -> None:
    # No two long ones fit a micro-batch.
    pipeline = ReplicaFigures(1e-3, 0.5, c_ms, 75, num_stages)
    instance = Instance([60] * num_long + [5] * (7 - num_long), [pipeline, pipeline])
    optimum_ms = instance.optimum_ms
    assert not instance.relaxation().is_impossible(optimum_ms * (1 + ROUNDING))
    # A replica is never faster than the work of its micro-batches.
    assert instance.relaxation().is_impossible(optimum_ms * 0.7)


def test_replicas_that_are_fast_for_different_lengths() -> None:
    # Long sequences cost more on the first, short ones on the second.
    instance = Instance(
        [40, 40, *([10] * 6)],
        [ReplicaFigures(0.05, 0.0, 0.0, 500), ReplicaFigures(0.0, 1.0, 0.0, 500)],
    )
    bound_ms = dispatch_bound_ms(instance.lengths, instance.costs)
    assert 0.6 * instance.optimum_ms <= bound_ms <= instance.optimum_ms
    assert instance.searched().found_ms == pytest.approx(instance.optimum_ms)


ATTENTION, EXCHANGE = (0.03, 0.0, 1.0), (0.0, 1.0, 1.0)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("max_tokens", [60, 130, 500])
def test_forms_share_micro_batches(num_stages: int, max_tokens: int) -> None:
    # Attention takes longest for the two long ones, the exchange for all others.
    lengths = [55, 50, 9, 8, 8, 3, 2]
    replica = ReplicaFigures(*ATTENTION, max_tokens, num_stages, others=(EXCHANGE,))
    for replicas in ([replica], [replica, replica]):
        instance = Instance(lengths, replicas)
        optimum_ms = instance.optimum_ms
        assert dispatch_bound_ms(lengths, instance.costs) <= optimum_ms * (1 + ROUNDING)
        assert not instance.relaxation().is_impossible(optimum_ms * (1 + ROUNDING))
        search = instance.searched()
        assert search.found_ms <= 1.01 * optimum_ms
        # 0.935 if long ones could always share the exchange's time, see ViewCoefficients.
        assert search.bound_ms >= 0.96 * optimum_ms


LONGER = st.lists(st.integers(1, 60), min_size=9, max_size=24)


@settings(max_examples=25)
@given(instances(), st.sampled_from([1, 10, 60]))
def test_a_larger_limit_does_not_raise_the_bound_above_the_optimum(
    instance: Instance, more: int
) -> None:
    larger = Instance(
        instance.lengths,
        [replace(r, max_tokens=r.max_tokens + more) for r in instance.replicas],
    )
    # The bound is below every plan that the smaller limit allows, including the best one.
    assert larger.searched().bound_ms <= instance.optimum_ms * (1 + ROUNDING)


@settings(max_examples=10)
@given(LONGER, st.lists(figures(STAGES), min_size=1, max_size=3), st.sampled_from([1, 10, 60]))
def test_the_bound_of_a_larger_limit_is_below_the_plan_of_a_smaller_one(
    lengths: list[int], replicas: list[ReplicaFigures], more: int
) -> None:
    assume(max(lengths) <= max(r.max_tokens for r in replicas))
    larger = [replace(r, max_tokens=r.max_tokens + more) for r in replicas]
    found_ms = Instance(lengths, replicas).searched().found_ms
    # That plan is within the larger limit as well.
    assert not Instance(lengths, larger).relaxation().is_impossible(found_ms * (1 + ROUNDING))


TEXTS = ("4*tp1", "tp2+2*tp1", "pp2+tp2", "pp4", "tp2+2*idle", "2*pp2")


@st.composite
def cost_models(draw: st.DrawFn) -> TableCostModel:
    a, b, c = (draw(st.sampled_from(values)) for values in ((0.0, 1e-3), (0.1, 1.0), (0.0, 20.0)))
    return TableCostModel(
        limits={
            degrees: draw(st.sampled_from([60, 75, 130, 500]))
            for degrees in ((1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 1, 4))
        },
        times=lambda scheme: Coefficients(
            a / scheme.num_ranks, b / scheme.num_ranks * 1.07**scheme.tp, c
        ),
    )


@settings(max_examples=20)
@given(
    st.one_of(lengths_of(7), LONGER),
    cost_models(),
    st.lists(st.sampled_from(TEXTS), min_size=2, max_size=4, unique=True),
)
def test_a_larger_pool_never_makes_the_plan_slower(
    lengths: list[int], model: TableCostModel, texts: list[str]
) -> None:
    strategies = [Strategy.parse(text, 4) for text in texts]
    times_s = [
        CertifiedPlanner(Pool.of(*strategies[:num]), model).plan(lengths).predicted_time_s
        for num in range(1, len(strategies) + 1)
    ]
    for smaller_s, larger_s in itertools.pairwise(times_s):
        assert larger_s <= smaller_s * (1 + 2 * ROUNDING)


@settings(max_examples=6)
@given(st.one_of(lengths_of(8), LONGER), cost_models(), st.integers(0, 3))
def test_the_same_input_and_seed_give_the_same_digest(
    lengths: list[int], model: TableCostModel, seed: int
) -> None:
    pool = Pool.of(*(Strategy.parse(text, 4) for text in TEXTS))
    planner = CertifiedPlanner(pool, model, seed=seed)
    first = planner.plan(lengths, iteration=3)
    # A planner keeps nothing of earlier batches.
    planner.plan([7] * 11)
    assert planner.plan(lengths, iteration=3).digest == first.digest
    assert (
        CertifiedPlanner(pool, model, seed=seed).plan(lengths, iteration=3).digest == first.digest
    )
    strategy = pool.strategy(first.strategy)
    first.validate(lengths, strategy, model.max_tokens)
