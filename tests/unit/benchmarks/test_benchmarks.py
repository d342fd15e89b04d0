"""The arithmetic of the benchmarks, on data with known answers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kernels, propose
from benchmarks.paired_statistics import paired_ratio
from benchmarks.pool_gain import Iteration, PoolGain
from benchmarks.prediction_error import figures
from benchmarks.static_against_megatron import SideSteps, loss_difference
from benchmarks.step_report import Spent, StepClock, StepReport, Traffic
from megatron.hydraulis.cost_model.device import Precision, device_constants
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.terminal import table_text
from tests.unit.observability.run_folders import make_record


def step(wall_s: float, *, loss: float = 2.0, **phases_s: float) -> StepReport:
    phases = {name: Spent(seconds, seconds / 2) for name, seconds in phases_s.items()}
    return StepReport(Spent(wall_s, wall_s / 2), phases, loss=loss, gradient_norm=1.0)


def test_equal_ratios_have_a_point_interval() -> None:
    estimate = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    assert estimate.num_pairs == 3


def test_a_disturbance_of_a_whole_pair_cancels_out() -> None:
    rng = np.random.default_rng(0)
    disturbance = rng.lognormal(sigma=1.0, size=40)
    own = rng.lognormal(sigma=0.02, size=40)
    estimate = paired_ratio(list(1.1 * own * disturbance), list(disturbance))
    assert 1.08 < estimate.low < estimate.value < estimate.high < 1.12


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
    assert (estimate.low, estimate.value, estimate.high) == (low, 5.0, 10 - low)


def test_a_true_ratio_lies_in_most_intervals() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        noise = rng.lognormal(sigma=0.1, size=20)
        estimate = paired_ratio(list(0.9 * noise), [1.0] * 20)
        hits += estimate.low <= 0.9 <= estimate.high
    assert 175 <= hits <= 199


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_invalid_pairs_are_refused(above: list[float], below: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs need equally many|must be positive"):
        paired_ratio(above, below)


def test_a_step_takes_the_time_of_its_slowest_rank_and_the_cpu_time_of_all() -> None:
    side = SideSteps(((step(0.2), step(0.3)), (step(0.5), step(0.1))), ())
    assert side.step_times_ms == pytest.approx([300.0, 500.0])
    assert side.cpu_times_ms == pytest.approx([250.0, 300.0])


def test_other_is_the_rest_of_the_phases() -> None:
    phases_s = {"gather": 0.1, "compute": 0.4, "scatter": 0.2, "optimizer": 0.1}
    side = SideSteps(((step(1.0, **phases_s), step(1.2, **phases_s)),), ())
    assert side.phases_ms["compute"] == pytest.approx(400.0)
    assert side.phases_ms["other"] == pytest.approx(300.0)  # mean of 200 and 400
    assert side.cpu_phases_ms["other"] == pytest.approx(300.0)  # sum of 100 and 200


def test_traffic_is_the_mean_over_ranks() -> None:
    side = SideSteps((), (Traffic(8, 6, 2), Traffic(4, 2, 2)))
    assert side.mean_traffic == Traffic(6, 4, 2)


def test_losses_are_compared_on_ranks_that_know_them() -> None:
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


def test_errors_are_medians_over_iterations() -> None:
    times_s = ((1.0, 1.0), (1.1, 1.0), (1.2, 1.0), (2.6, 2.0), (0.4, 0.5))
    records = [
        make_record(number, iteration_time_s=measured_s, predicted_time_s=predicted_s)
        for number, (measured_s, predicted_s) in enumerate(times_s, start=1)
    ]
    errors = figures("2*tp1", records)
    assert errors.num_iterations == 5
    assert errors.median == pytest.approx(0.2)
    assert errors.worst == pytest.approx(0.3)
    assert errors.median_signed == pytest.approx(0.1)
    assert errors.spread == pytest.approx((1.2 - 1.0) / 1.1)


def test_cases_have_the_sizes_and_widths_of_their_jobs() -> None:
    for name in ("7B A800", "8B h100-80g"):
        costs = propose.case_costs(name, 16)
        assert costs.model is not None
        assert costs.profile.regroup is not None
        assert costs.profile.regroup.cluster.num_ranks == costs.model.memory.num_ranks == 16
        schemes = {row.scheme: row for row in costs.profile.schemes}
        assert all(scheme.num_ranks <= 16 for scheme in schemes)
        # The published profile has no cp; of the estimate all rows are estimated.
        assert schemes[Scheme(tp=2, cp=4)].is_assumed is (name == "7B A800")


def test_the_table_of_cases_has_ranges_and_ends_with_means() -> None:
    results = [
        propose.CaseResult(
            name=str(gain),
            gains={"baseline": (gain, gain - 0.1, gain + 0.1), "other": (2 * gain, 2.0, 3.0)},
            of_ceiling=0.8,
            static="2*tp1",
            pool="2*tp1 tp2",
            cpu_s=1.0,
        )
        for gain in (1.0, 1.2)
    ]
    text = table_text(propose.case_table(results), 200)
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "1.200 (1.10 – 1.30)" in rows["1.2"]
    assert "2.000 (2.00 – 3.00)" in rows["1.0"]
    assert "1.100" in rows["mean"]
    assert "2.200" in rows["mean"]


def test_the_gain_of_a_pool_is_that_of_all_batches() -> None:
    def side(predicted_s: list[float], measured_s: list[float]) -> list[Iteration]:
        return [
            Iteration("S", predicted, 0.0, measured, (), 0.0, 0.0)
            for predicted, measured in zip(predicted_s, measured_s, strict=True)
        ]

    gain = PoolGain(
        pool=Pool.of(Strategy.parse("tp4", 4)),
        static="tp4",
        proposed=1.2,
        limits_tokens={},
        iterations={
            "static": side([2.0, 4.0], [2.2, 4.4]),
            "pool": side([1.0, 3.0], [1.0, 4.5]),
        },
    )
    assert gain.predicted.value == pytest.approx(1.5)
    assert gain.measured.value == pytest.approx(1.2)
    assert gain.gap.value == pytest.approx(0.3)
    # A resample of either batch alone: 2 - 2.2 and 4/3 - 4.4/4.5.
    assert (gain.gap.low, gain.gap.high) == pytest.approx((-0.2, 4 / 3 - 4.4 / 4.5))


def test_errors_of_kernels_by_device_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = device_constants("h200")
    assert device.kernels is not None
    time_ms = 1e3 * device.kernels.product_s(device.rates(Precision.BF16), 4096, 4096, 4096)
    (tmp_path / "gemm.csv").write_text(
        "device,m,n,k,latency_ms\n"
        f"H200-SXM,4096,4096,4096,{time_ms}\n"
        f"H200-SXM,4096,4096,4096,{time_ms / 1.3}\n"
        "H200-SXM,64,64,64,0.01\n"  # too short to be judged
        "GH200,4096,4096,4096,1.0\n"
    )
    figures_file = tmp_path / "figures.json"
    assert kernels.main(["--tables", str(tmp_path), "--json", str(figures_file)]) == 0
    [of_table] = json.loads(figures_file.read_text())
    assert (of_table["name"], of_table["rows"]) == ("h200 gemm", 2)
    assert of_table["median"] == pytest.approx(0.15)
    printed = capsys.readouterr()
    assert "GH200" in printed.err
    assert printed.out.strip().splitlines()[-1] == "0 of 1 within their goals; missed: h200 gemm"


def test_a_fit_finds_the_constants_of_synthetic_times() -> None:
    device = device_constants("b200")
    assert device.kernels is not None
    other = replace(
        device.kernels,
        collective=replace(device.kernels.collective, start_s=9e-6, ring_fraction=0.8),
    )
    kind = kernels.KINDS[-1]
    rows = [
        {"operation": operation, "num_ranks": str(ranks), "message_bytes": str(2**power)}
        for operation in ("all_gather", "all_reduce", "alltoall")
        for ranks in (2, 4, 8)
        for power in range(20, 30)
    ]
    for row in rows:
        row["latency_ms"] = str(1e3 * kind.predicted_s(other, device, row))
    found = kernels.fitted(device, kind, rows).collective
    assert found.start_s == pytest.approx(9e-6, rel=0.01)
    assert found.ring_fraction == pytest.approx(0.8, rel=0.01)
