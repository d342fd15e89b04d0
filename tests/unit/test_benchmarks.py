"""The arithmetic of the benchmarks, on data whose answer is known."""

import math

import numpy as np
import pytest

from benchmarks.comparison import SideSteps, loss_difference
from benchmarks.paired_statistics import paired_ratio
from benchmarks.step_report import Spent, StepClock, StepReport, Traffic


def step(wall_s: float, *, loss: float = 2.0, **phases_s: float) -> StepReport:
    phases = {name: Spent(seconds, seconds / 2) for name, seconds in phases_s.items()}
    return StepReport(Spent(wall_s, wall_s / 2), phases, loss=loss, gradient_norm=1.0)


def test_equal_ratios_leave_no_doubt() -> None:
    estimate = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (estimate.median, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    assert estimate.num_pairs == 3


def test_what_slows_a_whole_pair_cancels_out() -> None:
    rng = np.random.default_rng(0)
    disturbance = rng.lognormal(sigma=1.0, size=40)
    own = rng.lognormal(sigma=0.02, size=40)
    estimate = paired_ratio(list(1.1 * own * disturbance), list(disturbance))
    assert 1.08 < estimate.low < estimate.median < estimate.high < 1.12


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.995])
def test_the_interval_is_that_of_the_exact_bootstrap(confidence: float) -> None:
    # The median of 9 draws out of 1..9 is at most k if at least 5 of the draws are.
    def probability_of_at_most(k: int) -> float:
        share = k / 9
        return sum(math.comb(9, n) * share**n * (1 - share) ** (9 - n) for n in range(5, 10))

    low = next(k for k in range(1, 10) if probability_of_at_most(k) > (1 - confidence) / 2)
    estimate = paired_ratio(
        [float(value) for value in range(1, 10)], [1.0] * 9, confidence=confidence
    )
    assert (estimate.low, estimate.median, estimate.high) == (low, 5.0, 10 - low)


def test_a_true_ratio_lies_in_most_intervals() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        noise = rng.lognormal(sigma=0.1, size=20)
        estimate = paired_ratio(list(0.9 * noise), [1.0] * 20)
        hits += estimate.low <= 0.9 <= estimate.high
    assert 175 <= hits <= 199


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_what_is_no_pair_is_refused(above: list[float], below: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs need equally many|must be positive"):
        paired_ratio(above, below)


def test_a_step_lasts_as_long_as_its_slowest_rank_and_costs_what_all_cost() -> None:
    side = SideSteps(((step(0.2), step(0.3)), (step(0.5), step(0.1))), ())
    assert side.step_times_ms == pytest.approx([300.0, 500.0])
    assert side.cpu_times_ms == pytest.approx([250.0, 300.0])


def test_other_is_what_the_phases_leave() -> None:
    phases_s = {"gather": 0.1, "compute": 0.4, "scatter": 0.2, "optimizer": 0.1}
    side = SideSteps(((step(1.0, **phases_s), step(1.2, **phases_s)),), ())
    assert side.phases_ms["compute"] == pytest.approx(400.0)
    assert side.phases_ms["other"] == pytest.approx(300.0)  # mean of 200 and 400
    assert side.cpu_phases_ms["other"] == pytest.approx(300.0)  # sum of 100 and 200


def test_traffic_is_the_mean_over_ranks() -> None:
    side = SideSteps((), (Traffic(8, 6, 2), Traffic(4, 2, 2)))
    assert side.mean_traffic == Traffic(6, 4, 2)


def test_losses_are_compared_where_they_are_known() -> None:
    unknown = step(1.0, loss=math.nan)
    ours = [[unknown, step(1.0, loss=2.0)], [unknown, step(1.0, loss=1.002)]]
    plain = [[step(1.0, loss=2.0)], [step(1.0, loss=1.0)]]
    assert loss_difference(ours, plain) == pytest.approx(0.002)
    with pytest.raises(ValueError, match="no rank knows the loss"):
        loss_difference([[unknown]], [[unknown]])


def test_a_phase_inside_a_phase_counts_once() -> None:
    clock = StepClock()
    clock.start_step()
    with clock.measure("outer"), clock.measure("inner"):
        sum(range(100_000))
    report = clock.report(loss=1.0, gradient_norm=1.0)
    assert report.phases["inner"].wall_s > report.phases["outer"].wall_s >= 0.0
    assert report.phase("other").wall_s >= 0.0
