"""Ways to train the same batches, assumed costs of context parallelism, processes that plan."""

import gc
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron.hydraulis.cost_model import (
    AnalyticCostModel,
    Coefficients,
    JobCosts,
    device_constants,
)
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme, ProfiledStrategy
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.simulator.comparison import SimulationRequest, compare_ways
from megatron.hydraulis.simulator.results import WayResult, simulate_way
from megatron.hydraulis.simulator.ways import (
    BALANCED,
    CEILING,
    FEWEST_BATCHES_PER_PROCESS,
    FIXED_ROWS,
    MEGATRON_CP,
    PACKING,
    POOL,
    WAYS,
    BatchPlanning,
    TimedPlan,
    Ways,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.simulation import SMALL_SHAPE

NUM_RANKS = 4
RATES = {1: 1.0, 2: 0.9, 4: 0.8}
BATCHES = ((90, 20, 20, 10, 10, 10), (30, 30, 20, 20), (100, 5, 5, 5))

NUM_PROCESSES = 2
NUM_BATCHES = NUM_PROCESSES * FEWEST_BATCHES_PER_PROCESS + 1


def profile(*, overhead_ms: float = 0.0) -> ProfileCostModel:
    """Two tp ranks do a tenth more than one, four a fifth; wider ones hold more."""
    rows = (
        ProfiledScheme(
            scheme=Scheme(tp=tp, pp=pp),
            coefficients=Coefficients(0.001 / tp, RATES[tp] / pp, 1.0),
            max_tokens=limit,
        )
        for tp, pp, limit in ((1, 1, 50), (2, 1, 100), (4, 1, 200), (1, 2, 60))
    )
    strategies = (ProfiledStrategy(name="mixed", regroup_ms=overhead_ms),)
    return ProfileCostModel(
        device="d", source="s", date="t", schemes=tuple(rows), strategies=strategies
    )


def pool() -> Pool:
    return Pool.of(
        Strategy.parse("tp2+2*tp1", NUM_RANKS, name="mixed"),
        Strategy.parse("4*tp1", NUM_RANKS, name="short"),
    )


def ways(*, context: bool = True, seq_length: int | None = None) -> Ways:
    device = device_constants("a100-80")
    model = AnalyticCostModel(
        shape=SMALL_SHAPE, device=device, cluster=device.cluster(NUM_RANKS, NUM_RANKS)
    )
    return Ways(
        batches=BATCHES,
        pool=pool(),
        costs=JobCosts(profile=profile(), model=model if context else None),
        seq_length=seq_length,
        plan_time_s=0.0,
    )


@pytest.fixture(scope="module")
def results() -> dict[str, WayResult]:
    found = {}
    for way in WAYS:
        result = simulate_way(way, ways().candidates(way))
        assert result is not None
        found[way] = result
    return found


def test_every_way_trains_every_token(results: dict[str, WayResult]) -> None:
    for result in results.values():
        assert [each.num_tokens for each in result.accounts] == [sum(b) for b in BATCHES]


def test_every_further_freedom_saves_time(results: dict[str, WayResult]) -> None:
    times_s = [results[way].time_s for way in (FIXED_ROWS, PACKING, BALANCED, POOL)]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] < times_s[-2]


def test_no_way_is_faster_than_the_ceiling() -> None:
    generator = np.random.default_rng(7)
    for seq_length in (40, 100):
        batches = tuple(
            tuple(generator.integers(1, seq_length, size=generator.integers(1, 30)).tolist())
            for _ in range(8)
        )
        random = replace(ways(), batches=batches)
        times_s = {}
        for way in WAYS:
            result = simulate_way(way, random.candidates(way))
            assert result is not None
            times_s[way] = [each.time_ms for each in result.accounts]
        for way, of_way in times_s.items():
            assert all(low <= time for low, time in zip(times_s[CEILING], of_way, strict=True)), way


@pytest.mark.parametrize("way", [FIXED_ROWS, PACKING])
def test_no_candidate_is_faster_than_its_limit_by_which_it_is_left_out(way: str) -> None:
    generator = np.random.default_rng(7)
    small = (generator.integers(1, 51, size=generator.integers(1, 10)) for _ in range(100))
    shares = []
    for batches in (BATCHES, *((tuple(batch.tolist()),) for batch in small)):
        of_batches = replace(ways(), batches=batches, shape=SMALL_SHAPE)
        for candidate in of_batches.candidates(way):
            alone = replace(candidate, least_ms=0.0)
            result = simulate_way(way, [alone], shape=SMALL_SHAPE)
            assert result is not None
            shares.append(candidate.least_ms / (1e3 * result.time_s))
    assert max(shares) <= 1.0 + 1e-9
    assert max(shares) > 0.75


def test_progress_counts_the_plans_that_exist() -> None:
    reports: list[tuple[str, int, int]] = []
    before_plans: list[tuple[str, int, int]] = []

    class Recorded(BatchPlanning):
        def plans(self, *arguments: Any, **options: Any) -> Iterator[TimedPlan]:
            for plan in super().plans(*arguments, **options):
                before_plans.append(reports[-1])
                yield plan

    recorded = replace(
        ways(), planning=Recorded(), on_progress=lambda *report: reports.append(report)
    )
    assert list(recorded.candidates(POOL))
    assert before_plans == [(POOL, done, 3) for done in range(3)]
    assert reports[-1] == (POOL, 3, 3)


def request() -> SimulationRequest:
    return SimulationRequest(
        corpus=LengthCounts.of([50, 40, 10, 5]),
        sizes=BatchSizes.constant(num_sequences=4),
        pool=pool(),
        costs=JobCosts(profile=profile()),
        ways=(PACKING, BALANCED, POOL),
        iterations=2,
        plan_time_s=0.0,
    )


def test_every_phase_has_the_number_of_its_way() -> None:
    phases: dict[str, None] = {}
    compare_ways(request(), lambda what, done, total: phases.setdefault(what))
    assert list(phases) == [
        f"1/3 {PACKING}",
        f"2/3 {BALANCED}, quick plans",
        f"2/3 {BALANCED}",
        f"3/3 {POOL}",
    ]


def test_the_ceiling_takes_the_cheapest_rate_of_each_term() -> None:
    one = replace(ways(context=False), batches=((30, 10),))
    result = simulate_way(CEILING, one.candidates(CEILING))
    assert result is not None
    # A quarter of 0.001·Σs² and of 1.0·Σs, those of tp1; no constant.
    assert result.time_s == pytest.approx((0.001 * 1000 + 1.0 * 40) / 4 / 1e3)


def test_megatron_s_groups_train_each_sequence_once_within_limits() -> None:
    costs = ways().costs
    for candidate in ways().candidates(MEGATRON_CP):
        for work, batch in zip(candidate.works(), BATCHES, strict=True):
            found = [s for rows in work.replicas for row in rows for s in row.segments]
            assert sorted(found) == sorted(batch)
            for replica, rows in zip(work.strategy.replicas, work.replicas, strict=True):
                for row in rows:
                    for cp, _, lengths in row.groups:
                        group = replica.scheme.of_context_group(cp)
                        assert sum(lengths) <= costs.max_tokens(group)


def test_static_ways_hold_the_longest_sequence_of_all_batches(
    results: dict[str, WayResult],
) -> None:
    for way in (FIXED_ROWS, PACKING, BALANCED):
        assert set(results[way].num_uses) <= {"2*tp2", "tp4"}
    assert {strategy.name for strategy in ways(seq_length=150).static()} == {"tp4"}


def test_padding_is_what_fixed_shapes_add(results: dict[str, WayResult]) -> None:
    assert all(results[way].padding_fraction == 0.0 for way in (PACKING, BALANCED, POOL))
    # Rows of 100 tokens: 2 for each batch, since one replica of tp4 or two of tp2 fill them.
    num_computed = 3 * 2 * 100
    num_tokens = sum(map(sum, BATCHES))
    assert results[FIXED_ROWS].padding_fraction == pytest.approx(1 - num_tokens / num_computed)


def test_shares_of_a_way_add_up(results: dict[str, WayResult]) -> None:
    for result in results.values():
        assert sum(result.shares.values()) == pytest.approx(1.0)
        assert result.tokens_per_s == pytest.approx(result.num_tokens / result.time_s)
    content = results[POOL].to_json(results[PACKING])
    assert content["speed_up"] == pytest.approx(results[PACKING].time_s / results[POOL].time_s)
    assert content["utilisation"] == content["shares"]["work"]


def test_tasks_of_the_requested_iterations_are_kept() -> None:
    candidates = list(ways().candidates(POOL))
    everything = simulate_way(POOL, candidates)
    second = simulate_way(POOL, candidates, kept=range(2, 3))
    assert everything is not None
    assert second is not None
    assert [each.number for each in everything.iterations] == [1, 2, 3]
    assert [each.number for each in second.iterations] == [2]
    assert second.accounts == everything.accounts
    # A kept task has no reference to those that waited for it.
    assert not second.iterations[0].end.dependents
    assert gc.isenabled()


def test_a_profile_s_own_time_of_a_strategy_counts() -> None:
    (candidate,) = ways().candidates(POOL)
    free, costly = (
        simulate_way(POOL, [replace(candidate, cost_model=profile(overhead_ms=each))])
        for each in (0.0, 50.0)
    )
    assert free is not None
    assert costly is not None
    num_mixed = free.num_uses["mixed"]
    assert num_mixed > 0
    assert costly.time_s - free.time_s == pytest.approx(0.05 * num_mixed)


def test_a_strategy_s_own_limit_counts_in_static_ways() -> None:
    strategy = Strategy.parse("4*tp1", NUM_RANKS, name="roomy")
    roomy = replace(strategy, token_limits=((Scheme(), 120),))
    all_ways = replace(ways(), pool=Pool.of(roomy))
    assert "roomy" in {each.name for each in all_ways.static()}
    for way in (FIXED_ROWS, PACKING):
        made = [candidate.works() for candidate in all_ways.candidates(way)]
        works = [works for works in made if works[0].strategy == roomy]
        assert [work.num_tokens for work in works[0]] == [sum(batch) for batch in BATCHES]
        rows = [row for work in works[0] for replica in work.replicas for row in replica]
        assert max(row.num_tokens for row in rows) <= 120


def test_megatron_s_groups_are_skipped_if_their_cost_is_unknown() -> None:
    assert not list(ways(context=False).candidates(MEGATRON_CP))


def batches() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randint(2, 90) for _ in range(12)] for _ in range(NUM_BATCHES)]


def without_times(timed: Sequence[TimedPlan]) -> list[tuple[object, ...]]:
    plans = [each.plan for each in timed]
    return [(plan.iteration, plan.strategy, plan.replicas, plan.predicted_time_s) for plan in plans]


class DyingCostModel(ProfileCostModel):
    """Kills the process that plans with it."""

    def overhead_ms(self, strategy: Strategy, times: CostModel | None = None) -> float:
        assert multiprocessing.parent_process() is not None
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


def test_plans_do_not_depend_on_the_number_of_processes() -> None:
    def plans_of(planning: BatchPlanning) -> list[TimedPlan]:
        return list(planning.plans(pool(), Limits(profile()), batches()))

    alone = plans_of(BatchPlanning())
    before = multiprocessing.active_children()
    with BatchPlanning(NUM_PROCESSES) as planning:
        several = plans_of(planning)
        children = set(multiprocessing.active_children()).difference(before)
        assert len(children) == NUM_PROCESSES
        for child in children:  # before they import anything, too
            status = Path(f"/proc/{child.pid}/status").read_text()
            blocked = int(re.findall(r"SigBlk:\s*(\w+)", status)[0], 16)
            assert blocked >> (signal.SIGINT - 1) & 1
    assert without_times(several) == without_times(alone)
    assert [each.plan.iteration for each in alone] == list(range(NUM_BATCHES))
    assert min(each.cpu_s for each in several) > 0.0
    assert len(multiprocessing.active_children()) == len(before)


def test_a_batch_that_fits_nowhere_is_an_error_in_any_process() -> None:
    too_long = Pool.of(Strategy.parse("4*tp1", 4, name="short"))
    with BatchPlanning(NUM_PROCESSES) as planning, pytest.raises(PlanError, match="sequence"):
        list(planning.plans(too_long, Limits(profile()), [*batches(), [90]]))


def test_a_killed_process_is_an_error() -> None:
    found = profile()
    dying = DyingCostModel(
        device="d", source="s", date="t", schemes=found.schemes, strategies=found.strategies
    )
    with (
        BatchPlanning(NUM_PROCESSES) as planning,
        pytest.raises(PlanError, match="one of 2 planning processes was killed"),
    ):
        list(planning.plans(pool(), Limits(dying), batches()))


def test_a_request_refuses_what_its_flags_refuse() -> None:
    for name, value, option in (
        ("num_processes", 0, "--processes must be at least 1 but is 0"),
        ("plan_ahead", -1, "--plan-ahead must be at least 0 but is -1"),
        ("plan_time_s", -1.0, "--plan-time must be at least 0 but is -1"),
        ("iterations", 1.5, "--iterations must be a whole number but is 1.5"),
        ("long_sequences", "bogus", "--long-sequences 'bogus' is none of split, "),
    ):
        with pytest.raises(ConfigurationError, match=option):
            replace(request(), **cast(Any, {name: value}))
