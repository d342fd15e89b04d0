"""Lanes of tasks; iterations whose times are known: closed forms, plans with waves, planning,
regrouping, the sum of all times."""

import itertools
import math

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.pipeline import StageCosts, stage_parts
from megatron.hydraulis.cost_model.regrouping import Hiding
from megatron.hydraulis.errors import ConfigurationError, HydraulisError, PlanError
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.simulator.simulation import EventLoop, Simulator, stage_program
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.transfer.canonical import Unit
from tests.support.planning import TableCostModel
from tests.support.simulation import (
    SMALL_SHAPE,
    checked_account,
    compute_ms,
    regroup_costs,
    simulator,
    work_of,
)


def test_a_lane_runs_its_tasks_in_sequence() -> None:
    loop = EventLoop()
    tasks = [loop.add("a", duration) for duration in (3.0, 0.0, 2.0)]
    loop.run()
    assert [(task.start_ms, task.end_ms) for task in tasks] == [(0, 3), (3, 3), (3, 5)]


def test_a_task_starts_when_its_lane_is_free_and_all_it_waits_for_has_ended() -> None:
    loop = EventLoop()
    first = loop.add("a", 3.0)
    other = loop.add("b", 5.0)
    both = loop.add("a", 1.0, [first, other, None])
    behind = loop.add("a", 1.0)
    loop.run()
    assert (both.start_ms, behind.start_ms) == (5, 6)


def test_a_task_may_wait_for_one_that_is_added_later() -> None:
    loop = EventLoop()
    early = loop.add("a", 1.0)
    late = loop.add("b", 4.0)
    loop.wait(early, [late])
    loop.run()
    assert (early.start_ms, early.end_ms) == (4, 5)


def test_a_lane_keeps_its_order_even_if_the_next_task_could_start() -> None:
    loop = EventLoop()
    slow = loop.add("b", 7.0)
    loop.add("a", 1.0, [slow])
    ready = loop.add("a", 1.0)
    loop.run()
    assert ready.start_ms == 8


def test_tasks_that_wait_in_a_cycle_are_named() -> None:
    loop = EventLoop()
    second = loop.add("a", 1.0)
    first = loop.add("b", 1.0, [second])
    loop.wait(second, [first])
    with pytest.raises(HydraulisError, match="cycle but 2 never start, on 2 lanes"):
        loop.run()


@pytest.mark.parametrize("duration_ms", [-1.0, float("inf"), float("nan")])
def test_an_invalid_time_is_refused(duration_ms: float) -> None:
    with pytest.raises(ValueError, match="finite time from 0 on"):
        EventLoop().add("a", duration_ms)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 5), (2, 1), (3, 2), (4, 9)])
def test_equal_micro_batches_take_v_plus_pp_minus_1_times_t(
    num_stages: int, num_micro_batches: int
) -> None:
    work = work_of(f"pp{num_stages}", [[12] * num_micro_batches], num_ranks=num_stages)
    (iteration,) = simulator().run([work])
    assert iteration.end_ms == pytest.approx((num_micro_batches + num_stages - 1) * 12)


def test_the_order_of_unequal_micro_batches_counts() -> None:
    times = [
        simulator().run([work_of("pp2", [order], num_ranks=2)])[0].end_ms
        for order in ([4, 1, 4], [1, 4, 4])
    ]
    assert times == [pytest.approx(16.0), pytest.approx(12 + 1 / 3)]


def test_a_stage_runs_1f1b() -> None:
    program = [f"{'F' if forward else 'B'}{k}" for forward, k in stage_program(0, 3, 4)]
    assert program == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert [k for _, k in stage_program(2, 3, 2)] == [0, 0, 1, 1]
    assert [forward for forward, _ in stage_program(0, 4, 2)] == [True, True, False, False]


def test_the_slowest_replica_determines_the_iteration_and_others_wait() -> None:
    work = work_of("tp2+2*tp1+2*idle", [[10], [4, 4], []], num_ranks=6)
    (iteration,) = simulator().run([work])
    result = checked_account(iteration, started_ms=0.0)
    assert result.time_ms == 10
    assert result.work_ms == 2 * 10 + 8
    assert result.imbalance_ms == (10 - 8) + 10 + 2 * 10
    assert result.imbalance == pytest.approx(10 * 4 / (2 * 10 + 8))
    assert result.replica_times_ms == (10, 8, 0)


def test_the_cost_models_overhead_follows_the_slowest_replica() -> None:
    work = work_of("2*tp1", [[10], [4]], num_ranks=2)
    slow = simulator(overheads={work.strategy.name: 5.0})
    iterations = slow.run([work, work])
    assert [iteration.end_ms for iteration in iterations] == [15, 30]
    result = checked_account(iterations[1], started_ms=15.0)
    assert (result.regroup_ms, result.makespan_ms) == (2 * 5, 10)


class TestPlanning:
    def ends_ms(self, plan_time_s: float, plan_ahead: int) -> list[float]:
        work = work_of("tp1", [[10]], num_ranks=1, plan_time_s=plan_time_s)
        return [i.end_ms for i in simulator(plan_ahead=plan_ahead).run([work] * 4)]

    def test_plans_made_ahead_in_less_than_an_iteration_cost_nothing(self) -> None:
        assert self.ends_ms(0.01, plan_ahead=1) == [10, 20, 30, 40]

    def test_training_waits_for_a_slower_planner(self) -> None:
        assert self.ends_ms(0.016, plan_ahead=1) == [10, 26, 42, 58]

    def test_plans_ahead_are_a_head_start_and_no_more(self) -> None:
        # The planner starts at 0 and makes them in sequence.
        assert self.ends_ms(0.016, plan_ahead=3) == [10, 26, 42, 58]
        assert self.ends_ms(0.004, plan_ahead=3) == [10, 20, 30, 40]

    def test_without_plans_ahead_planning_is_between_iterations(self) -> None:
        assert self.ends_ms(0.004, plan_ahead=0) == [10, 24, 38, 52]
        work = work_of("tp1", [[10]], num_ranks=1, plan_time_s=0.004)
        iterations = simulator(plan_ahead=0).run([work, work])
        assert checked_account(iterations[1], started_ms=10.0).planning_ms == pytest.approx(4)


class TestRegrouping:
    work = work_of("tp2+2*tp1", [[10, 10], [20], [20]], num_ranks=4)

    def end_ms(self, *, hiding: Hiding = Hiding.THREADS, **links: float) -> float:
        costs = regroup_costs(4, hiding=hiding, **links)  # type: ignore[arg-type]
        return simulator(regroup=costs, shape=SMALL_SHAPE).run([self.work] * 3)[-1].end_ms

    def test_slower_links_make_longer_iterations(self) -> None:
        fast, slow = self.end_ms(), self.end_ms(across_bytes_per_s=5e6)
        assert 3 * 20 < fast < slow
        assert self.end_ms(inside_bytes_per_s=1e6) > fast

    def test_nodes_make_longer_iterations_than_one_node(self) -> None:
        assert self.end_ms(ranks_per_node=4) < self.end_ms(ranks_per_node=2)

    def test_overlap_saves_time_but_never_more_than_regrouping_takes(self) -> None:
        alone, overlapped = self.end_ms(hiding=Hiding.NOTHING), self.end_ms()
        assert 3 * 20 < overlapped < self.end_ms(hiding=Hiding.ONE_QUEUE) < alone

    def test_without_overlap_the_parts_add_up(self) -> None:
        costs = regroup_costs(4)
        times = costs.times(self.work.strategy)
        regroup_ms = math.fsum(c.gather_ms + c.scatter_ms + c.update_ms for c in times.calls)
        assert self.end_ms(hiding=Hiding.NOTHING) == pytest.approx(3 * (20 + regroup_ms))
        assert regroup_ms == pytest.approx(times.total_ms)

    def test_collectives_come_in_one_order_and_never_two_at_once(self) -> None:
        run = simulator(regroup=regroup_costs(4), shape=SMALL_SHAPE)
        iterations = run.run([self.work] * 2)
        tasks = [
            task
            for iteration in iterations
            for task in (
                *(call.gather for call in iteration.calls),
                *(call.scatter for call in reversed(iteration.calls)),
            )
        ]
        for earlier, later in itertools.pairwise(tasks):
            assert earlier.end_ms <= later.start_ms

    def test_a_layer_starts_when_its_parameters_have_arrived(self) -> None:
        # So slow that compute waits for every bucket.
        costs = regroup_costs(4, inside_bytes_per_s=1e4, across_bytes_per_s=1e4)
        (iteration,) = simulator(regroup=costs, shape=SMALL_SHAPE).run([self.work])
        arrivals = [call.gather.end_ms for call in iteration.calls]
        for replica in iteration.replicas:
            first = replica.by_stage[0][0]
            starts = [task.start_ms for task in first.tasks]
            assert len(starts) == len(arrivals) == 6
            assert starts == pytest.approx(arrivals)

    def test_with_one_queue_compute_waits_for_all_gathers_and_later_stages_for_their_end(
        self,
    ) -> None:
        work = work_of("2*pp2", [[10, 10], [10, 10]], num_ranks=4)
        costs = regroup_costs(4, hiding=Hiding.ONE_QUEUE)
        _, second = simulator(regroup=costs, shape=SMALL_SHAPE).run([work] * 2)
        arrived_ms = max(call.gather.end_ms for call in second.calls)
        scattered_ms = min(call.scatter.start_ms for call in second.calls)
        for replica in second.replicas:
            first, last = replica.by_stage
            assert first[0].start_ms >= arrived_ms
            assert last[-1].end_ms <= scattered_ms < first[-1].end_ms

    @pytest.mark.parametrize("hiding", Hiding)
    def test_waiting_for_parameters_is_not_the_filling_of_a_pipeline(self, hiding: Hiding) -> None:
        work = work_of("pp2+2*tp1", [[10, 10], [20], []], num_ranks=4)
        alone = simulator(shape=SMALL_SHAPE).run([work] * 2)[1]
        costs = regroup_costs(4, hiding=hiding, inside_bytes_per_s=1e6)
        first, second = simulator(regroup=costs, shape=SMALL_SHAPE).run([work] * 2)
        found = checked_account(second, started_ms=first.end_ms)
        assert found.parameters_ms > 0.0
        started_ms = alone.begin_ms
        assert found.fill_ms == pytest.approx(checked_account(alone, started_ms=started_ms).fill_ms)

    def test_a_host_that_is_slower_than_the_device_binds_a_replica(self) -> None:
        times = Coefficients(0.0, 1.0, 0.0, host_ms=15.0)
        work = work_of("2*tp1", [[10, 10], [10]], num_ranks=2)
        (iteration,) = simulator(times=times).run([work])
        assert iteration.replica_ends_ms == (30.0, 15.0)

    def test_a_bucket_is_scattered_after_its_last_backward(self) -> None:
        costs = regroup_costs(4, inside_bytes_per_s=1e12, across_bytes_per_s=1e12)
        (iteration,) = simulator(regroup=costs, shape=SMALL_SHAPE).run([self.work])
        layers = [iteration.calls[1 + layer].scatter.start_ms for layer in range(4)]
        assert layers == sorted(layers, reverse=True)
        slowest = max(iteration.replica_ends_ms)
        assert slowest - 1.0 < layers[0] <= slowest < iteration.end_ms

    def test_every_bucket_follows_its_update_into_the_next_iteration(self) -> None:
        first, second = simulator(regroup=regroup_costs(4), shape=SMALL_SHAPE).run([self.work] * 2)
        for update, after in zip(first.updates, second.calls, strict=True):
            assert update.end_ms <= after.gather.start_ms
        assert second.calls[0].gather.start_ms < first.end_ms

    def test_a_profiled_time_replaces_the_estimate_by_bytes(self) -> None:
        run = simulator(
            regroup=regroup_costs(4),
            shape=SMALL_SHAPE,
            overheads={self.work.strategy.name: 3.0},
        )
        (iteration,) = run.run([self.work])
        assert iteration.end_ms == 23
        assert iteration.calls == iteration.updates == ()

    @pytest.mark.parametrize("hiding", [Hiding.ONE_QUEUE, Hiding.MANY_QUEUES])
    @pytest.mark.parametrize("text", ["pp4", "2*pp2", "2*pp2:1,3", "tp2pp2", "2*tp2"])
    def test_an_iteration_exposes_what_is_estimated(self, text: str, hiding: Hiding) -> None:
        regroup = regroup_costs(4, hiding=hiding)
        strategy = Strategy.parse(text, 4, ranks_per_node=2)
        work = work_of(text, [[4] * 3] * len(strategy.replicas), num_ranks=4)
        for ms_per_token in (0.001, 0.01, 0.1, 1.0):
            times = Coefficients(0.0, ms_per_token, 0.0)
            took_ms = [
                iterations[1].end_ms - iterations[0].end_ms
                for costs in (None, regroup)
                for iterations in [
                    simulator(times=times, regroup=costs, shape=SMALL_SHAPE).run([work] * 2)
                ]
            ]
            model = TableCostModel(times=lambda _, times=times: times, default_limit=4)  # type: ignore[misc]
            stages = StageCosts(model, SMALL_SHAPE)
            exposed_ms = regroup.exposed_ms(strategy, stages.usual_times_ms)
            assert took_ms[1] - took_ms[0] == pytest.approx(exposed_ms)

    def test_ranks_of_another_cluster_are_refused(self) -> None:
        run = simulator(regroup=regroup_costs(8), shape=SMALL_SHAPE)
        with pytest.raises(ConfigurationError, match="4 ranks but the cluster has 8"):
            run.run([self.work])


class TestStages:
    def test_stages_take_the_time_of_their_layers_and_the_output_layer(self) -> None:
        costs = StageCosts(
            TableCostModel(times=lambda _: Coefficients(6.0, 12.0, 3.0)), SMALL_SHAPE
        )
        first, last = costs.coefficients(Scheme(pp=2, layers=(3, 1)))
        layer, output = SMALL_SHAPE.num_matrix_parameters_per_layer, 64 * 32
        assert (first.a_ms_per_token2, first.b_ms_per_token, first.c_ms) == (6.0, 12.0, 3.0)
        assert (last.a_ms_per_token2, last.c_ms) == (2.0, 1.0)
        assert last.b_ms_per_token == pytest.approx(12.0 * (layer + output) / (3 * layer))
        _, parts = stage_parts(SMALL_SHAPE, Scheme(pp=2, layers=(3, 1)))
        assert dict(parts)[Unit.output()] == pytest.approx(output / (layer + output))

    def test_a_lighter_stage_shortens_the_iteration(self) -> None:
        work = work_of("pp2:3,1", [[30, 30, 30]], num_ranks=2)
        equal = simulator().run([work])[0].end_ms
        uneven = simulator(shape=SMALL_SHAPE).run([work])[0].end_ms
        assert 3 * 30 < uneven < equal == pytest.approx(4 * 30)


def test_padding_is_computed_and_counted_separately() -> None:
    packed = MicroBatchWork.packed([3, 5], num_padding=2)
    assert (packed.num_tokens, packed.num_padding, packed.segments) == (8, 2, (3, 5))
    assert packed.time_ms(Coefficients(1.0, 10.0, 0.5)) == 34 + 100 + 0.5
    # A window of 2 tokens in half of the layers leaves out (1 + 9) / 2.
    windowed = Coefficients(1.0, 10.0, 0.5, AttentionWindow(2, 0.5))
    assert packed.time_ms(windowed) == 34 - 5 + 100 + 0.5


def test_the_same_works_take_the_same_times() -> None:
    works = [work_of("tp2+pp2", [[7, 3, 5], [2, 9]], num_ranks=4)] * 3

    def starts() -> list[float]:
        run = simulator(regroup=regroup_costs(4), shape=SMALL_SHAPE)
        return [
            operation.start_ms
            for iteration in run.run(works)
            for replica in iteration.replicas
            for operations in replica.by_stage
            for operation in operations
        ]

    assert starts() == starts()


def test_times_that_do_not_add_up_are_noticed() -> None:
    work = work_of("pp2+2*tp1", [[5, 5], [3], []], num_ranks=4)
    for task in ("first", "last"):
        (iteration,) = simulator().run([work])
        checked_account(iteration, started_ms=0.0)
        forward, *_, backward = iteration.replicas[0].by_stage[0]
        if task == "first":
            forward.tasks[0].duration_ms += 1.0
        else:
            backward.tasks[0].start_ms -= 4.0
        with pytest.raises(AssertionError):
            checked_account(iteration, started_ms=0.0)


def test_an_iteration_without_any_work_takes_no_time() -> None:
    (iteration,) = simulator().run([work_of("2*tp1", [[], []], num_ranks=2)])
    assert (compute_ms(iteration), iteration.end_ms) == (0, 0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="costs of stages have 0"):
        Simulator(StageCosts(TableCostModel()), regroup=regroup_costs(4))
    with pytest.raises(PlanError, match="1 lists for 2 replicas"):
        work_of("2*tp1", [[1]], num_ranks=2)
    with pytest.raises(PlanError, match="at least 1 trained token"):
        MicroBatchWork(0, (1,))


def wave_times(scheme: Scheme) -> Coefficients:
    """Wider groups communicate more."""
    return Coefficients(2e-3 / scheme.cp, 0.5 / scheme.cp + 0.05 * scheme.cp, 2.0 * scheme.cp)


@pytest.mark.parametrize("text", ["cp4~", "cp2~pp2", "2*cp2~"])
def test_an_iteration_takes_the_predicted_time(text: str) -> None:
    strategy = Strategy.parse(text, 4)
    model = TableCostModel(default_limit=512, times=wave_times)
    lengths = [300, 20, 20, 35, 64, 120, 5, 5, 7, 9, 11, 200, 90, 80, 30]
    plan = CertifiedPlanner(Pool.of(strategy), model).plan(lengths)
    assert any(m.groups for replica in plan.replicas for m in replica.micro_batches)
    (iteration,) = Simulator(StageCosts(model)).run([IterationWork.of_plan(plan, strategy)])
    assert iteration.end_ms == pytest.approx(plan.makespan_s * 1e3)


@pytest.mark.parametrize("text", ["pp4", "cp2~pp2", "2*pp2"])
def test_the_share_of_the_forward_of_a_scheme_counts_in_plan_and_simulation(text: str) -> None:
    strategy = Strategy.parse(text, 4)
    lengths = [400, 300, 35, 64, 120, 210, 90, 80, 30]
    makespans_s = []
    for share in (1 / 3, 0.2):
        times = Coefficients(2e-3, 0.5, 2.0, forward_share=share)
        model = TableCostModel(default_limit=512, times=lambda _, times=times: times)  # type: ignore[misc]
        plan = CertifiedPlanner(Pool.of(strategy), model).plan(lengths)
        (iteration,) = Simulator(StageCosts(model)).run([IterationWork.of_plan(plan, strategy)])
        assert iteration.end_ms == pytest.approx(plan.makespan_s * 1e3)
        makespans_s.append(plan.makespan_s)
    assert makespans_s[0] != makespans_s[1]
