"""Waves on any batch: valid, deterministic, and never below their bound or the optimum."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.limits import RowRounding
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.planner.costs import GroupCost, Pipeline, SchemeCost, WaveCosts
from megatron.hydraulis.planner.plan import IterationPlan, Packing
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.wave_bounds import simple_bound_ms, wave_bound_ms
from megatron.hydraulis.planner.wave_packing import LengthTable, fill_wave, pack_waves
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel

COLUMN_TOKENS = 64
ROUNDING = 1e-9
FACTORS = st.sampled_from((0.0, 0.4, 1.0, 2.5))
# Ratios of a, b and c in another form to the first one's.
FURTHER_FORMS = st.lists(st.tuples(FACTORS, FACTORS, FACTORS), max_size=2)


@st.composite
def wave_costs(draw: st.DrawFn, most_width: int = 8, *, most_stages: int = 1) -> WaveCosts:
    """Costs in which any term may be 0; wide groups have a cost, or even a gain.

    Groups of several columns may have further forms.
    """
    width = draw(st.sampled_from([w for w in (2, 4, 8) if w <= most_width]))
    a = draw(st.sampled_from((0.0, 1e-3, 0.05)))
    b = draw(st.sampled_from((0.0, 0.1, 1.0)))
    c = draw(st.sampled_from((0.0, 1.0, 30.0)))
    exchange, latency = draw(st.sampled_from((0.0, 0.02))), draw(st.sampled_from((0.0, 0.5)))
    tp = draw(st.sampled_from((1, 2)))
    window = draw(st.sampled_from((None, AttentionWindow(9, 0.5))))
    factors, host_ms = draw(FURTHER_FORMS), draw(st.sampled_from((0.0, 0.0, 2.0, 40.0)))
    groups = []
    size = 1
    while size <= width:
        wide = math.log2(size)
        times = Coefficients(a / size, b / size + exchange * wide, c + latency * wide, window)
        if size > 1:
            others = (times.scaled(a=of_a / size, b=of_b, c=of_c) for of_a, of_b, of_c in factors)
            times = replace(times, others=tuple(others), host_ms=host_ms)
        limit = COLUMN_TOKENS * size
        # The profile may have only some sizes.
        if size < width and draw(st.integers(0, 5)) == 0:
            limit = 0
        groups.append(GroupCost(size, times, limit, tp=tp))
        size *= 2
    return WaveCosts(tuple(groups), Pipeline(draw(st.integers(1, most_stages))))


def scheme_cost(costs: WaveCosts) -> SchemeCost:
    return SchemeCost(
        costs.mean_coefficients, costs.most_tokens, costs.pipeline.num_stages, waves=costs
    )


def packed(costs: WaveCosts, lengths: Sequence[int]) -> Packing:
    return pack_waves(range(len(lengths)), lengths, scheme_cost(costs))


def check_waves(costs: WaveCosts, lengths: Sequence[int], packing: Packing) -> list[float]:
    """Check the rules of waves; returns their times, computed here from the lengths."""
    by_size = {group.size: group for group in costs.groups}
    seen: list[int] = []
    times_ms = []
    for micro_batch in packing.with_lengths(lengths):
        end = 0
        of_wave: list[float] = []
        for share in micro_batch.shares(costs.width):
            group = by_size[share.group.size]
            assert share.group.offset == end
            assert end % group.size == 0
            end += group.size
            if share.lengths:
                row = Scheme(group.tp, group.size).row_tokens(share.lengths)
                held = row if group.size > 1 else sum(share.lengths)
                assert held <= group.max_tokens
            assert share.lengths == tuple(lengths[sequence] for sequence in share.sequences)
            seen += share.sequences
            of_wave += (
                form.a_ms_per_token2 * sum(map(form.squared, share.lengths))
                + form.b_ms_per_token * sum(share.lengths)
                + form.c_ms
                for form in (group.coefficients, *group.coefficients.others)
            )
        assert end == costs.width
        times_ms.append(max(of_wave))
    assert sorted(seen) == list(range(len(lengths)))
    return times_ms


@st.composite
def cases(draw: st.DrawFn, most: int = 40) -> tuple[WaveCosts, list[int]]:
    costs = draw(wave_costs())
    lengths = st.integers(1, costs.longest) | st.integers(1, max(1, costs.longest // 8))
    return costs, draw(st.lists(lengths, min_size=1, max_size=most))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_waves_hold_every_sequence_once_and_are_not_below_their_bound(
    case: tuple[WaveCosts, list[int]],
) -> None:
    costs, lengths = case
    packing = packed(costs, lengths)
    times_ms = check_waves(costs, lengths, packing)
    replica_ms = max(math.fsum(times_ms), len(times_ms) * costs.groups[-1].coefficients.host_ms)
    assert math.isclose(packing.time_ms, replica_ms, rel_tol=ROUNDING)
    assert packed(costs, lengths) == packing
    simple_ms = simple_bound_ms(costs, lengths)
    bound_ms = wave_bound_ms(costs, lengths, packing.time_ms, Solver(Deadline(None)))
    most_ms = packing.time_ms * (1.0 + ROUNDING)
    assert simple_ms <= most_ms
    assert min(simple_ms, packing.time_ms) * (1.0 - ROUNDING) <= bound_ms <= most_ms


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(0.0, 1.0))
def test_a_wave_is_filled_up_to_its_time_in_every_form(
    case: tuple[WaveCosts, list[int]], share: float
) -> None:
    costs, lengths = case
    table = LengthTable(costs, lengths)
    counts = table.counts(lengths)
    least_ms, most_ms = table.least_ms[0], costs.mean_coefficients.time_ms(lengths)
    wave = fill_wave(table, counts, least_ms + share * max(0.0, most_ms - least_ms))
    assert wave is not None
    groups = [
        (
            1 << group.size_index,
            [table.lengths[i] for i, n in group.counts.items() for _ in range(n)],
        )
        for group in wave.groups
    ]
    assert sum(size for size, _ in groups) == costs.width
    time_ms = costs.wave_time_ms(groups)
    assert time_ms <= (least_ms + share * max(0.0, most_ms - least_ms)) * (1.0 + ROUNDING)
    assert wave.time_ms == pytest.approx(time_ms, rel=ROUNDING)


class CountedReads(list[list[float]]):
    """A list that counts how often one of its items is read."""

    num_reads = 0

    def __getitem__(self, place: int) -> list[float]:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(place)


def test_a_wave_looks_at_few_lengths_that_it_does_not_take() -> None:
    groups = (GroupCost(size, Coefficients(0.0, 1.0 / size, 1.0), 100 * size) for size in (1, 2, 4))
    lengths = [*range(1, 401), *range(2, 11)]
    table = LengthTable(WaveCosts(tuple(groups)), lengths)
    table.works_ms = CountedReads(table.works_ms)
    left = table.counts(lengths)
    taken: list[int] = []
    while left.places:
        wave = fill_wave(table, left, 101.0)
        assert wave is not None
        held = table.held(wave)
        left = left.without(held)
        taken += (table.lengths[place] for place in wave.counts for _ in range(wave.counts[place]))
        assert left.totals == table.counts([*(Counter(lengths) - Counter(taken)).elements()]).totals
    assert sorted(taken) == sorted(lengths)
    # All lengths for each of some 200 waves would be 80,000.
    assert table.works_ms.num_reads < 3 * len(lengths)


def partitions(things: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All partitions of things into unordered sets."""
    if not things:
        yield []
        return
    first, rest = things[0], things[1:]
    for num in range(len(rest) + 1):
        for others in itertools.combinations(rest, num):
            left = tuple(thing for thing in rest if thing not in others)
            for more in partitions(left):
                yield [(first, *others), *more]


def best_wave_ms(costs: WaveCosts, lengths: Sequence[int], members: tuple[int, ...]) -> float:
    """The shortest wave with these sequences, over all tilings."""
    best_ms = math.inf
    usable = [group for group in costs.groups if group.max_tokens > 0]
    smallest = usable[0]
    for sets in partitions(members):
        for choice in itertools.product(usable, repeat=len(sets)):
            num_idle = costs.width - sum(group.size for group in choice)
            if num_idle < 0 or num_idle % smallest.size:
                continue
            fits = all(
                sum(group.padded(lengths[i]) for i in of_set) <= group.room_tokens
                for group, of_set in zip(choice, sets, strict=True)
            )
            if fits:
                times_ms = [
                    group.time_ms([lengths[i] for i in of_set])
                    for group, of_set in zip(choice, sets, strict=True)
                ]
                # Idle columns are in the cheapest groups.
                idle_ms = smallest.time_ms(()) if num_idle else 0.0
                best_ms = min(best_ms, max(*times_ms, idle_ms))
    return best_ms


@settings(max_examples=40, deadline=None)
@given(wave_costs(4, most_stages=3), st.data())
def test_waves_of_tiny_batches_are_nearly_optimal(costs: WaveCosts, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, costs.longest), min_size=1, max_size=4))
    wave_ms = functools.cache(functools.partial(best_wave_ms, costs, lengths))
    best_ms = min(
        costs.replica_time_ms(times_ms)
        for waves in partitions(tuple(range(len(lengths))))
        for times_ms in itertools.permutations(map(wave_ms, waves))
        if math.inf not in times_ms
    )
    found_ms = packed(costs, lengths).time_ms
    # A plan above the optimum, so that only what is proved counts.
    bound_ms = wave_bound_ms(costs, lengths, found_ms * 1.4, Solver(Deadline(None)))
    assert bound_ms <= best_ms * (1.0 + ROUNDING)
    assert best_ms <= found_ms * (1.0 + ROUNDING)
    # Filling has no guarantee, but with few sequences it misses little.
    assert found_ms <= best_ms * 1.2 + ROUNDING


def one_column(times: Coefficients, *others: Coefficients) -> WaveCosts:
    return WaveCosts((GroupCost(1, replace(times, others=others), 10),))


# Two sequences on a column each take 10 ms, one on both columns takes 4 ms.
WIDE_IS_FASTER = (
    GroupCost(1, Coefficients(0.0, 1.0, 0.0), 10),
    GroupCost(2, Coefficients(0.0, 0.4, 0.0), 12),
)
WITH_HOST = replace(WIDE_IS_FASTER[1], coefficients=Coefficients(0.0, 0.4, 0.0, host_ms=9.0))


@pytest.mark.parametrize(
    ("costs", "lengths", "best_ms"),
    [
        # The first wave takes 100 ms in the first form, the second one 80 ms in the other: each
        # form takes less for both.
        (one_column(Coefficients(1.0, 0.0, 0.0), Coefficients(0.0, 8.0, 0.0)), [10, *[2] * 5], 180),
        # A constant of one form leaves the other as much room.
        (one_column(Coefficients(0.0, 0.0, 50.0), Coefficients(0.0, 10.0, 0.0)), [4, 4], 80),
        (WaveCosts(WIDE_IS_FASTER), [10, 10], 8),
        (WaveCosts((WIDE_IS_FASTER[0], WITH_HOST)), [10, 10], 10),
    ],
)
def test_waves_are_chosen_and_bounded_by_all_forms_and_the_host(
    costs: WaveCosts, lengths: list[int], best_ms: float
) -> None:
    found_ms = packed(costs, lengths).time_ms
    assert found_ms == pytest.approx(best_ms)
    bound_ms = wave_bound_ms(costs, lengths, 1.2 * found_ms, Solver(Deadline(None)))
    assert bound_ms == pytest.approx(best_ms)


def test_columns_without_sequences_are_grouped_by_the_time_of_their_padding() -> None:
    """Padding of 24 tokens takes 24 ms on one column and 120 ms on two."""
    rows = (RowRounding(Scheme(cp=size), 24, 48) for size in (1, 2))
    groups = (
        GroupCost(size, Coefficients(0.0, b_ms, 0.0), 48, rows=of_size)
        for size, b_ms, of_size in zip((1, 2), (1.0, 5.0), rows, strict=True)
    )
    wide = GroupCost(4, Coefficients(0.0, 5.0, 1.0), 48)
    assert packed(WaveCosts((*groups, wide)), [14]).time_ms == 24.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_waves_of_a_pipeline_are_as_short_as_filling_it_asks(seed: int) -> None:
    sizes = ((1, 2.0), (2, 2.4))
    groups = (
        GroupCost(size, Coefficients(1e-5 / size, 0.1 / size, c_ms), 20_000 * size, tp=1)
        for size, c_ms in sizes
    )
    costs = WaveCosts(tuple(groups), Pipeline(4))
    lengths = np.random.default_rng(seed).lognormal(math.log(900), 1.3, 24).astype(int).tolist()
    found_ms = packed(costs, lengths).time_ms
    # With the longest first and as few waves as possible, 1.8 to 3.5 times the bound.
    assert found_ms <= 1.5 * wave_bound_ms(costs, lengths, found_ms, Solver(Deadline(None)))


@settings(max_examples=25, deadline=None)
@given(wave_costs(4, most_stages=3), st.data())
def test_the_bound_of_a_pipeline_of_waves_holds(costs: WaveCosts, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, costs.longest), min_size=1, max_size=12))
    packing = packed(costs, lengths)
    times_ms = check_waves(costs, lengths, packing)
    assert packing.time_ms >= math.fsum(times_ms) * (1.0 - ROUNDING)
    bound_ms = wave_bound_ms(costs, lengths, packing.time_ms, Solver(Deadline(None)))
    assert bound_ms <= packing.time_ms * (1.0 + ROUNDING)


STRATEGIES = ("cp8~", "cp4~pp2", "2*cp4~", "tp2cp2~+cp4~", "cp4~+cp2+2*tp1", "cp4+cp2~+pp2")


def cost_model() -> TableCostModel:
    sizes = (1, 2, 4, 8)
    return TableCostModel(
        limits={(tp, cp, pp): 48 * tp * cp for tp in (1, 2) for cp in sizes for pp in (1, 2)},
        times=lambda scheme: Coefficients(
            1e-3 / scheme.num_ranks,
            0.2 / scheme.num_ranks * (1.0 + 0.1 * math.log2(scheme.cp)),
            3.0,
        ),
    )


@pytest.mark.parametrize("text", STRATEGIES)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=30))
def test_planners_plan_replicas_that_split_their_width(text: str, lengths: list[int]) -> None:
    pool, model = Pool.of(Strategy.parse(text, 8)), cost_model()
    longest = max(
        model.max_tokens(Scheme(scheme.tp, scheme.cp, scheme.pp))
        for scheme in pool.strategies[0].schemes
    )
    lengths = [min(length, longest) for length in lengths]
    greedy, certified = (
        planner(pool, model).plan(lengths) for planner in (GreedyPlanner, CertifiedPlanner)
    )
    for plan in (greedy, certified):
        # The plan checks limits, padding, groups and sequences.
        plan.validate(lengths, pool.strategies[0], model.max_tokens)
        assert IterationPlan.from_json(plan.to_json()).digest == plan.digest
        for report in (plan.dispatch, plan.packing):
            assert report is not None
            assert "greedy:" not in report.status
            assert report.bound_s <= plan.makespan_s * (1.0 + ROUNDING)
    assert certified.predicted_time_s <= greedy.predicted_time_s * (1.0 + ROUNDING)
    assert CertifiedPlanner(pool, model).plan(lengths).digest == certified.digest
