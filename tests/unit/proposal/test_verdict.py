"""The baseline of a pool: every setting is tried, and measured rows keep their ratio to a model."""

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.inputs import llama_shape
from megatron.hydraulis.assumed import Corner
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.proposal.propose import ProposalRequest, propose
from megatron.hydraulis.proposal.verdict import (
    OPEN_TEXT,
    RECOMPUTE_EVERY_LAYER,
    Baseline,
    CornerGain,
    PoolVerdict,
    Setting,
    best_baseline,
    judged,
    print_measurements,
)
from megatron.hydraulis.simulator.ways import BALANCED, MEGATRON_CP, PACKING, Ways
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

SHAPE = llama_shape(
    num_layers=24,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    vocab_size=32000,
)
REQUEST = ProposalRequest(
    corpus=LengthCounts.of([500, 2000, 9000, 30000], [200, 50, 10, 1]),
    sizes=BatchSizes.constant(num_sequences=40),
    num_ranks=8,
    ranks_per_node=8,
    num_batches=2,
    max_strategies=1,
)


def costs_of(model: AnalyticCostModel) -> JobCosts:
    profile = estimated_profile(model)
    return JobCosts.of(profile, model).with_widths()


@pytest.fixture(scope="module")
def costs() -> JobCosts:
    device = device_constants("a100-80g")
    return costs_of(AnalyticCostModel(shape=SHAPE, device=device, cluster=device.cluster(8, 8)))


def test_a_model_with_windows_is_not_compared_with_a_ring(costs: JobCosts) -> None:
    assert costs.model is not None
    shape = replace(SHAPE, num_windowed_layers=1, window_tokens=64)
    windowed = costs_of(replace(costs.model, shape=shape))
    assert all(not setting.ring for setting in Setting.all_of(windowed))
    assert any(setting.ring for setting in Setting.all_of(costs))


def test_the_baseline_is_the_fastest_of_all_settings_and_ways(costs: JobCosts) -> None:
    settings = list(Setting.all_of(costs))
    texts = [setting.text for setting in settings]
    ring, recomputed = ", TE attention", ", every layer recomputed"
    assert texts == ["", ring, recomputed + ring]
    pool = propose(REQUEST, costs.profile).pool
    times_s = []
    for setting in settings:
        ways = Ways(batches=REQUEST.batches, pool=pool, costs=setting.costs, seq_length=30000)
        static_s = []
        for strategy in ways.static():
            planner = CertifiedPlanner(Pool.of(strategy), setting.costs.profile, seed=REQUEST.seed)
            static_s.append(fmean(planner.plan(b).predicted_time_s for b in REQUEST.batches))
        for way in (MEGATRON_CP, PACKING):
            found = ways.fastest(way)
            assert found is not None
            overhead_ms = setting.costs.overhead_ms(found[0][0].strategy)
            static_s.append(found[1] + overhead_ms / 1e3)
        times_s.append(min(static_s))
    best = best_baseline(REQUEST, settings, pool)
    assert best is not None
    assert best.time_s == pytest.approx(min(times_s), rel=1e-9)
    fewer = best_baseline(REQUEST, settings[:1], pool)
    assert fewer is not None
    assert fewer.time_s == pytest.approx(times_s[0], rel=1e-9)
    assert min(times_s) < 0.95 * times_s[0]  # the other settings matter in this job


def test_a_setting_of_estimates_is_the_estimate_of_its_flags(costs: JobCosts) -> None:
    assert costs.model is not None
    model = replace(costs.model, recompute=EVERY_LAYER, cp_comm_type="auto", has_te_attention=True)
    wanted, setting = costs_of(model), list(Setting.all_of(costs))[2]
    for row in wanted.profile.schemes:
        assert setting.costs.profile.find(row.scheme) == row
    assert setting.costs.profile.find(Scheme(1)) is not None  # does not fit without it


def test_measured_rows_change_as_the_model_does(costs: JobCosts) -> None:
    assert costs.model is not None
    slower = replace(
        costs.profile,
        source="measured",
        schemes=tuple(
            replace(row, coefficients=row.coefficients.scaled(a=1.5, b=1.5, c=1.5))
            for row in costs.profile.schemes
        ),
    )
    measured = list(Setting.all_of(JobCosts.of(slower, costs.model)))[2].costs
    estimated = list(Setting.all_of(costs))[2].costs
    for row in slower.schemes:
        times, of_model = (each.coefficients(row.scheme) for each in (measured, estimated))
        assert times.b_ms_per_token == pytest.approx(1.5 * of_model.b_ms_per_token)
        assert measured.max_tokens(row.scheme) == estimated.max_tokens(row.scheme)


def test_a_setting_replaces_the_flags_of_recomputation(costs: JobCosts) -> None:
    words = [
        "--bf16",
        "--recompute-granularity",
        "selective",
        "--recompute-activations",
        "--lr",
        "1",
    ]
    every = Setting(costs=costs, recomputation=RECOMPUTE_EVERY_LAYER)
    assert every.words(words) == ["--bf16", "--lr", "1", *RECOMPUTE_EVERY_LAYER]
    assert Setting(costs=costs, recomputation=()).words(words) == ["--bf16", "--lr", "1"]
    assert Setting(costs=costs).words(words) == words


def test_a_proposal_is_judged_by_the_baseline(costs: JobCosts) -> None:
    proposal = propose(REQUEST, costs.profile)
    verdict = judged(REQUEST, costs, proposal).verdict
    assert verdict is not None
    assert verdict.gain == verdict.baseline.time_s / proposal.mean_s
    assert proposal.static_s is not None
    assert verdict.baseline.time_s < proposal.static_s
    assert verdict.baseline.text in str(verdict)


def test_a_corner_moves_what_is_assumed_and_leaves_what_was_measured(costs: JobCosts) -> None:
    assert costs.model is not None
    device = costs.model.device
    low, high = (costs.at_corner(corner) for corner in (Corner.LOW, Corner.HIGH))
    for moved, factor in ((low, 1.7), (high, 0.6)):
        assert moved.model is not None
        assert device.core_factor is not None
        assert moved.model.device.core_factor == pytest.approx(factor * device.core_factor)
        assert moved.model.device.memory_bytes == device.memory_bytes
    kernels = [each.model.kernels for each in (low, costs, high) if each.model is not None]
    assert [each.product_share for each in kernels] == pytest.approx(
        [0.998, 0.907, 0.771], abs=1e-3
    )
    for name in ("hidden_passes", "ffn_passes", "weight_passes"):
        passes = [getattr(each, name) for each in kernels]
        assert passes == pytest.approx([0.7 * passes[1], passes[1], 1.4 * passes[1]])
    assert [each.attention_backward for each in kernels] == [1.15, 1.0, 0.85]
    scheme = Scheme(2, 2)
    times = [each.coefficients(scheme) for each in (low, costs, high)]
    assert times[0] != times[1] != times[2]
    assert [each.max_tokens(scheme) for each in (low, high)] == [costs.max_tokens(scheme)] * 2
    measured = JobCosts.of(replace(costs.profile, source="measured"), costs.model)
    for corner in Corner:
        there = measured.at_corner(corner)
        assert there.coefficients(scheme) == times[1]
        strategy = Strategy.parse("4*tp2", 8)
        assert there.overhead_ms(strategy) != measured.overhead_ms(strategy)


def test_a_verdict_has_the_gains_of_both_corners(costs: JobCosts) -> None:
    proposal = propose(REQUEST, costs.profile)
    verdict = judged(REQUEST, costs, proposal).verdict
    assert verdict is not None
    assert [each.corner for each in verdict.corners] == [Corner.LOW, Corner.HIGH]
    least, most = verdict.range
    assert least <= verdict.gain <= most
    assert least < most
    for each in verdict.corners:
        there = list(Setting.all_of(costs.at_corner(each.corner)))
        alone = best_baseline(REQUEST, there, proposal.pool)
        assert alone is not None
        assert each.baseline.time_s == pytest.approx(alone.time_s)
    assert f"{verdict.gain:.2f} ({least:.2f} to {most:.2f}) × as fast as " in str(verdict)
    found = verdict.to_json()
    assert found["range"] == [least, most]
    assert set(found["corners"]) == {"low", "high"}


def test_a_verdict_whose_sign_is_open_says_what_to_measure(
    costs: JobCosts, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, ring, recomputed = Setting.all_of(costs)
    pool = Pool.of(Strategy.parse("tp8", 8))

    def baseline(text: str, where: Setting) -> Baseline:
        return Baseline(way=BALANCED, strategy=Strategy.parse(text, 8), setting=where, time_s=1.0)

    def verdict(low: float, high: float) -> PoolVerdict:
        corners = (
            CornerGain(corner=Corner.LOW, baseline=baseline("8*tp1", recomputed), gain=low),
            CornerGain(corner=Corner.HIGH, baseline=baseline("2*tp4", setting), gain=high),
        )
        return PoolVerdict(
            baseline=baseline("4*tp2", ring),
            gain=1.02,
            corners=corners,
            pool=pool,
            setting=setting,
        )

    assert verdict(0.97, 1.1).is_open
    assert verdict(0.97, 1.1).text == "1.02 (0.97 to 1.10) ×"
    assert not verdict(1.001, 1.1).is_open
    assert verdict(1.02, 1.021).text == "1.02 ×"
    assert verdict(1.1, 0.97).range == (0.97, 1.1)
    assert verdict(1.03, 1.05).range == (1.02, 1.05)
    assert verdict(1.001, 1.1).to_json()["to_measure"] == []
    assert verdict(0.97, 1.1).to_json()["to_measure"] == [
        {"setting": "", "schemes": ["tp8", "tp4"]},
        {"setting": "TE attention", "schemes": ["tp2"]},
        {"setting": "every layer recomputed, TE attention", "schemes": ["tp1"]},
    ]
    assert OPEN_TEXT in str(verdict(0.97, 1.1))
    assert OPEN_TEXT not in str(verdict(1.001, 1.1))
    print_measurements(verdict(0.97, 1.1).to_measure, pool, ["--bf16"])
    own, with_ring, with_both = capsys.readouterr().out.splitlines()
    assert " --out profile.json --schemes tp8 tp4 -- --bf16" in own
    assert " --schemes tp2 -- --bf16 --core-attention te " in with_ring
    assert " --schemes tp1 -- --bf16 --recompute-granularity full " in with_both
    outs = [line.partition("--out ")[2].split()[0] for line in (own, with_ring, with_both)]
    assert len(set(outs)) == 3
