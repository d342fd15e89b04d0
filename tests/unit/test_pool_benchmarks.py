"""Benchmarks of an alternating pool: what its runs do, and its ratios on times that are known."""

import math

from benchmarks.alternating_pool import ALTERNATING, FIRST, SECOND, SIDES, Alternation, block_plans
from benchmarks.iteration_block import BlockReport, IterationReport
from benchmarks.step_report import Spent
from benchmarks.workload import Workload
from megatron.hydraulis.strategy import Strategy


def block(wall_s: float, cpu_s: float) -> BlockReport:
    phases = {"gather": Spent(0.1, 0.02), "scatter": Spent(0.3, 0.04)}
    iteration = IterationReport(wall_s / 4, phases, 0.05, 0.1, 1000, 2.0)
    return BlockReport(Spent(wall_s, cpu_s), (iteration,) * 4, Spent(0.4, 0.04))


def alternation(walls_s: dict[str, float], *, without_overlap_s: float) -> Alternation:
    """Three blocks on two ranks, each disturbed as a whole; rank 1 is the slower one."""
    blocks: dict[tuple[str, bool], list[tuple[BlockReport, ...]]] = {}
    for run, overlap in SIDES:
        wall_s = walls_s[run] if overlap else without_overlap_s
        blocks[run, overlap] = [
            (block(wall_s * d / 2, wall_s / 4), block(wall_s * d, wall_s / 4))
            for d in (1.0, 3.0, 1.5)
        ]
    return Alternation("a", "b", blocks)


def test_the_ratio_is_to_the_mean_of_both_static_runs() -> None:
    found = alternation({ALTERNATING: 3.3, FIRST: 2.0, SECOND: 4.0}, without_overlap_s=6.6)
    for cpu in (False, True):
        assert math.isclose(found.ratio(True, cpu=cpu).median, 1.1)
        assert math.isclose(found.ratio(False, cpu=cpu).low, 2.2)
        assert math.isclose(found.worth_of_overlap(cpu=cpu).high, 2.0)
    assert math.isclose(found.times_ms((ALTERNATING, True))[1], 1000 * 3.3 * 3 / 4)


def test_waits_and_shares_count_the_last_gather() -> None:
    found = alternation({ALTERNATING: 4.0, FIRST: 4.0, SECOND: 4.0}, without_overlap_s=4.0)
    gather_ms, scatter_ms = found.waits_ms((ALTERNATING, True))
    assert math.isclose(gather_ms, 1000 * (4 * 0.05 + 0.4) / 4)
    assert math.isclose(scatter_ms, 100.0)
    # 4 · (0.02 + 0.04) + 0.04 s of each rank, of 1 s.
    assert math.isclose(found.regroup_shares[1], 0.28)


def test_an_iteration_of_a_strategy_is_the_same_in_every_run() -> None:
    workload = Workload(num_micro_batches=8)
    first, second = (Strategy.parse(text, 4, name=text) for text in ("4*tp1", "2*tp2"))
    both, alone = (block_plans(used, workload, 3) for used in ((first, second), (second,)))
    assert [plan.strategy for plan in both] == ["4*tp1", "2*tp2"] * 2
    assert both[1::2] == alone[1::2]
    assert [len(replica) for replica in both[0].replicas] == [2] * 4
    assert both[0].num_tokens == both[1].num_tokens == 8 * sum(workload.lengths)
