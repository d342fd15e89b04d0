"""Regrouping and update in the predicted time: what is exposed, and for which strategies."""

import pickle
from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledScheme,
    ProfiledStrategy,
)
from megatron.hydraulis.cost_model.regrouping import (
    CallTimes,
    Hiding,
    RegroupCosts,
    RegroupTimes,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Scheme, Strategy
from megatron.hydraulis.transfer.canonical import Unit
from tests.support.simulation import regroup_costs

MIXED, SINGLE, PIPELINE = "tp2+2*tp1", "2*tp2", "tp1pp2+tp2"


def strategy(text: str, name: str | None = None) -> Strategy:
    return Strategy.parse(text, 4, name=name, ranks_per_node=2)


def profile(*rows: ProfiledStrategy) -> ProfileCostModel:
    schemes = (Scheme(), Scheme(tp=2), Scheme(pp=2))
    return ProfileCostModel(
        device="test",
        source="test",
        date="2026-01-01",
        schemes=tuple(
            ProfiledScheme(
                scheme=scheme, coefficients=Coefficients(0.0, 0.001, 0.01), max_tokens=100
            )
            for scheme in schemes
        ),
        strategies=rows,
    )


class TestExposed:
    times = RegroupTimes(
        (
            CallTimes((0,), (Unit.embedding(),), gather_ms=2.0, scatter_ms=4.0, update_ms=1.0),
            CallTimes((1,), (Unit.layer(0),), gather_ms=2.0, scatter_ms=4.0, update_ms=3.0),
        ),
        received_bytes=0.0,
    )

    def test_gathers_run_while_later_buckets_are_updated(self) -> None:
        # Updates end at 1 and 4, gathers at 3 and 6; scatters take 8.
        assert self.times.total_ms == 16.0
        assert self.times.exposed_ms([0.0, 0.0], [0.0, 0.0]) == 6.0 + 8.0

    def test_scatters_run_while_earlier_layers_are_computed(self) -> None:
        # The layer's backward ends at 10, the embedding's at 15; scatters end at 14 and 19.
        assert self.times.exposed_ms([0.0, 0.0], [5.0, 10.0]) == 6.0 + 19.0 - 15.0

    def test_the_first_forward_runs_while_later_buckets_are_gathered(self) -> None:
        # It begins after the update, at 4. Gathers end at 3 and 6, forwards at 9 and 10.
        assert self.times.exposed_ms([5.0, 1.0], [0.0, 0.0]) == 10.0 - 6.0 + 8.0

    @pytest.mark.parametrize("text", [MIXED, SINGLE, PIPELINE])
    @pytest.mark.parametrize("micro_batch_ms", [0.0, 0.01, 1.0])
    def test_the_rule_of_one_queue_hides_something_but_not_all(
        self, text: str, micro_batch_ms: float
    ) -> None:
        exposed_ms = {
            hiding: regroup_costs(4, hiding=hiding).exposed_ms(
                strategy(text), lambda of: [(micro_batch_ms / 3, micro_batch_ms * 2 / 3)] * of.pp
            )
            for hiding in Hiding
        }
        update_ms = sum(call.update_ms for call in regroup_costs(4).times(strategy(text)).calls)
        most, by_rule, least = (
            exposed_ms[hiding] for hiding in (Hiding.NOTHING, Hiding.ONE_QUEUE, Hiding.THREADS)
        )
        assert update_ms < least <= by_rule * (1 + 1e-9)
        assert by_rule < most
        if micro_batch_ms:
            assert least < by_rule

    def test_a_pool_has_one_queue_if_some_strategy_has_tp(self) -> None:
        costs = regroup_costs(4, hiding=Hiding.MANY_QUEUES)
        narrow, wide = strategy("4*tp1"), strategy(MIXED)
        assert costs.for_pool([narrow]) is costs
        of_pool = costs.for_pool([narrow, wide])
        assert of_pool.hiding is Hiding.ONE_QUEUE

        def times(scheme: Scheme) -> list[tuple[float, float]]:
            return [(1.0, 2.0)] * scheme.pp

        assert costs.exposed_ms(narrow, times) < of_pool.exposed_ms(narrow, times)
        assert costs.exposed_ms(wide, times) == of_pool.exposed_ms(wide, times)

    @pytest.mark.parametrize("text", ["4*tp1", "2*pp2", "pp2+2*tp1"])
    def test_many_queues_hide_gathers_and_one_hides_none(self, text: str) -> None:
        def times(scheme: Scheme) -> list[tuple[float, float]]:
            return [(1.0, 2.0)] * scheme.pp

        exposed_ms = {
            hiding: regroup_costs(4, hiding=hiding).exposed_ms(strategy(text), times)
            for hiding in Hiding
        }
        assert exposed_ms[Hiding.NOTHING] > exposed_ms[Hiding.ONE_QUEUE]
        assert exposed_ms[Hiding.ONE_QUEUE] > exposed_ms[Hiding.MANY_QUEUES]
        assert exposed_ms[Hiding.MANY_QUEUES] >= exposed_ms[Hiding.THREADS]

    def test_a_later_stage_hides_nothing_with_one_queue(self) -> None:
        costs = regroup_costs(4, hiding=Hiding.ONE_QUEUE, inside_bytes_per_s=1e7)
        pipeline = strategy("2*pp2:1,3")
        alone_ms, hidden_ms = (
            costs.exposed_ms(pipeline, lambda _, ms=ms: [(ms / 3, ms * 2 / 3)] * 2)  # type: ignore[misc]
            for ms in (0.0, 1e3)
        )
        calls = costs.times(pipeline).calls
        without_first_stage = [c.scatter_ms for c in calls if min(c.buckets) > 1]
        assert 0 < len(without_first_stage) < len(calls)
        assert alone_ms - hidden_ms == pytest.approx(sum(without_first_stage))


class TestBf16Gradients:
    in_fp32 = regroup_costs(8, ranks_per_node=4)
    in_bf16 = replace(in_fp32, gradient_bytes=2)

    def times(self, text: str) -> tuple[RegroupTimes, RegroupTimes]:
        of = Strategy.parse(text, 8, ranks_per_node=4)
        return self.in_fp32.times(of), self.in_bf16.times(of)

    @pytest.mark.parametrize("text", ["tp4+4*tp1", "2*tp4", "4*pp2", "tp2pp2+2*tp2"])
    def test_scatters_take_half_the_time_and_nothing_else_changes(self, text: str) -> None:
        for wide, narrow in zip(*(times.calls for times in self.times(text)), strict=True):
            halved = replace(wide, scatter_ms=pytest.approx(wide.scatter_ms / 2))  # type: ignore[arg-type]
            assert narrow == halved

    def test_relays_replace_the_reduce_scatter_between_nodes(self) -> None:
        # A share crosses to the other node once. Without relays 4 of 8 ranks would send it.
        wide, narrow = self.times("8*tp1")
        for before, after in zip(wide.calls, narrow.calls, strict=True):
            assert after.gather_ms == before.gather_ms
            assert after.scatter_ms < before.scatter_ms

    def test_advice_where_it_saves_more_than_one_percent(self) -> None:
        of = Strategy.parse("2*tp4", 8, ranks_per_node=4)
        costs = replace(self.in_fp32, hiding=Hiding.NOTHING)
        scatter_ms = sum(call.scatter_ms for call in costs.times(of).calls)

        def advice(costs: RegroupCosts, iteration_ms: float) -> str | None:
            return costs.bf16_advice({of: 1.0}, lambda of: [(0.0, 0.0)] * of.pp, iteration_ms)

        saved_ms = scatter_ms / 2
        numbers = f"save {saved_ms:,.1f} ms of an iteration's {99 * saved_ms:,.1f} ms"
        assert numbers in (advice(costs, 99 * saved_ms) or "")
        assert advice(costs, 101 * saved_ms) is None
        assert advice(replace(costs, gradient_bytes=2), saved_ms) is None
        assert advice(replace(costs, parameter_bytes=4), saved_ms) is None


class TestOverheads:
    costs = regroup_costs(4, ranks_per_node=4, hiding=Hiding.ONE_QUEUE)

    def test_a_renamed_strategy_keeps_its_measured_overhead(self) -> None:
        row = ProfiledStrategy(name="S6", replicas=SINGLE, regroup_ms=320.0, optimizer_ms=5.0)
        assert profile(row).overhead_ms(strategy(SINGLE, "P1")) == 325.0
        assert profile(row).overhead_ms(strategy("tp2@0,2+tp2@1,3", "S6")) == 0.0  # other ranks
        assert profile(row).overhead_ms(strategy(MIXED, "S6")) == 0.0

    def test_names_count_in_profiles_without_replicas(self) -> None:
        row = ProfiledStrategy(name="S6", regroup_ms=320.0)
        assert profile(row).overhead_ms(strategy(SINGLE, "S6")) == 320.0
        assert profile(row).overhead_ms(strategy(SINGLE, "P1")) == 0.0
        # Unless the name is the notation.
        row = ProfiledStrategy(name=SINGLE, regroup_ms=320.0)
        assert profile(row).overhead_ms(strategy(SINGLE, "P1")) == 320.0

    @pytest.mark.parametrize("replicas", [SINGLE, None])
    def test_an_unmeasured_mixture_is_charged_in_proportion_to_what_was_measured(
        self, replicas: str | None
    ) -> None:
        computed = profile().with_regrouping(self.costs)
        single_ms, mixed_ms = (computed.overhead_ms(strategy(text)) for text in (SINGLE, MIXED))
        assert 0.0 < single_ms < mixed_ms  # tp1 holds twice as much
        row = ProfiledStrategy(name="S6", replicas=replicas, regroup_ms=3.0 * single_ms)
        calibrated = profile(row).with_regrouping(self.costs, [strategy(SINGLE, "S6")])
        assert calibrated.overhead_ms(strategy(SINGLE, "S6")) == 3.0 * single_ms
        factor = calibrated.overhead_ms(strategy(MIXED)) / mixed_ms
        # The factor lengthens regrouping but not what hides it.
        assert factor == pytest.approx(3.0, rel=0.2)
        assert calibrated.regroup is not None
        assert calibrated.regroup.times(strategy(MIXED)).total_ms == pytest.approx(
            3.0 * self.costs.times(strategy(MIXED)).total_ms
        )

    def test_overheads_with_gradients_of_another_size_only_scale(self) -> None:
        costs = replace(self.costs, gradient_bytes=2)
        in_fp32_ms, in_bf16_ms = (
            profile().with_regrouping(each).overhead_ms(strategy(SINGLE))
            for each in (self.costs, costs)
        )
        row = ProfiledStrategy(name="S6", replicas=SINGLE, regroup_ms=3.0 * in_fp32_ms)
        calibrated = profile(row).with_regrouping(costs)
        assert calibrated.overhead_ms(strategy(SINGLE)) == pytest.approx(3.0 * in_bf16_ms, rel=0.05)
        with pytest.raises(ConfigurationError, match=r"in 2 bytes each or in 4 but .* is 3;"):
            replace(profile(row), gradient_bytes=3)
        measured = replace(profile(row), gradient_bytes=2)
        assert measured.with_regrouping(costs).overhead_ms(strategy(SINGLE)) == 3.0 * in_fp32_ms
        assert ProfileCostModel.from_json(measured.to_json(), what="profile") == measured

    @pytest.mark.parametrize("replicas", ["4*tp2", "tp4"])
    def test_rows_of_another_job_or_without_their_schemes_count_for_nothing(
        self, replicas: str
    ) -> None:
        row = ProfiledStrategy(name="S6", replicas=replicas, regroup_ms=9e3)
        assert profile(row).with_regrouping(self.costs).regroup == self.costs

    def test_the_file_has_the_replicas(self) -> None:
        before = profile(ProfiledStrategy(name="S6", replicas=SINGLE, regroup_ms=1.0))
        again = ProfileCostModel.from_json(before.to_json(), what="profile")
        assert again == before
        # Computed overheads are no part of it.
        assert before.with_regrouping(self.costs).to_json() == before.to_json()

    def test_it_is_pickled_without_what_was_computed(self) -> None:
        costs = regroup_costs(4)
        size = len(pickle.dumps(costs))
        costs.times(strategy(MIXED))
        again = pickle.loads(pickle.dumps(costs))
        assert len(pickle.dumps(costs)) == size
        assert again == costs
        assert again.times(strategy(MIXED)) == costs.times(strategy(MIXED))

    def test_bad_factors_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"positive but is 0\.0"):
            replace(self.costs, factor=0.0)
