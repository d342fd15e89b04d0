"""Benchmarks of an alternating pool: what its runs do, and its ratios on times that are known."""

import math

from benchmarks.alternating_pool import ALTERNATING, FIRST, SECOND, Alternation, block_plans
from benchmarks.iteration_block import BlockReport
from benchmarks.step_report import Spent
from benchmarks.workload import Workload
from megatron.hydraulis.strategy import Strategy


def alternation(walls_s: dict[str, float]) -> Alternation:
    """Three blocks on two ranks, each disturbed equally on both; rank 1 is the slower one."""

    def block(wall_s: float, cpu_s: float) -> BlockReport:
        return BlockReport(Spent(wall_s, cpu_s), (0.6, 0.4), 4000)

    blocks: dict[str, list[tuple[BlockReport, ...]]] = {
        run: [
            (block(wall_s * d / 2, wall_s / 4), block(wall_s * d, wall_s / 4))
            for d in (1.0, 3.0, 1.5)
        ]
        for run, wall_s in walls_s.items()
    }
    return Alternation("a", "b", blocks)


def test_the_ratio_is_to_the_mean_of_both_static_runs() -> None:
    found = alternation({ALTERNATING: 3.3, FIRST: 2.0, SECOND: 4.0})
    for cpu in (False, True):
        assert math.isclose(found.ratio(cpu=cpu).median, 1.1)
    assert math.isclose(found.times_ms(ALTERNATING)[1], 1000 * 3.3 * 3 / 4)


def test_waits_and_bytes_are_those_of_an_iteration() -> None:
    found = alternation({ALTERNATING: 4.0, FIRST: 4.0, SECOND: 4.0})
    gather_ms, scatter_ms = found.waits_ms(ALTERNATING)
    assert math.isclose(gather_ms, 150.0)
    assert math.isclose(scatter_ms, 100.0)
    assert found.regroup_bytes(FIRST) == 1000


def test_an_iteration_of_a_strategy_is_the_same_in_every_run() -> None:
    workload = Workload(num_micro_batches=8)
    first, second = (Strategy.parse(text, 4, name=text) for text in ("4*tp1", "2*tp2"))
    both, alone = (block_plans(used, workload, 3) for used in ((first, second), (second,)))
    assert [plan.strategy for plan in both] == ["4*tp1", "2*tp2"] * 2
    assert both[1::2] == alone[1::2]
    assert [plan.num_micro_batches for plan in both] == [2, 4, 2, 4]
