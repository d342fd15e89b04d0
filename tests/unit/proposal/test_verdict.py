"""The baseline of a pool: every setting is tried, and measured rows keep their ratio to a model."""

from dataclasses import replace

import pytest

from benchmarks.inputs import llama_shape
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.proposal.propose import ProposalRequest, best_static, propose
from megatron.hydraulis.proposal.verdict import (
    RECOMPUTE_EVERY_LAYER,
    Setting,
    best_baseline,
    judged,
)
from megatron.hydraulis.simulator.ways import MEGATRON_CP, Ways
from megatron.hydraulis.strategy import Scheme

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


def test_the_baseline_is_the_fastest_of_all_settings_and_of_dynamic_cp(costs: JobCosts) -> None:
    settings = list(Setting.all_of(costs))
    texts = [setting.text for setting in settings]
    ring, recomputed = ", ring of Transformer Engine", ", every layer recomputed"
    assert texts == ["", recomputed, ring, recomputed + ring]
    pool = propose(REQUEST, costs.profile).pool
    times_s = []
    for setting in settings:
        found = best_static(REQUEST, setting.costs.profile)
        assert found is not None
        ways = Ways(batches=REQUEST.batches, pool=pool, costs=setting.costs, seq_length=30000)
        dynamic = ways.fastest(MEGATRON_CP)
        assert dynamic is not None
        overhead_ms = setting.costs.overhead_ms(dynamic[0][0].strategy)
        times_s += [found[1], dynamic[1] + overhead_ms / 1e3]
    best = best_baseline(REQUEST, settings, pool)
    assert best is not None
    assert best.time_s == pytest.approx(min(times_s), rel=1e-9)
    fewer = best_baseline(REQUEST, settings[:1], pool)
    assert fewer is not None
    assert fewer.time_s == pytest.approx(min(times_s[:2]), rel=1e-9)
    assert min(times_s) < 0.95 * min(times_s[:2])  # the other settings matter in this job


def test_a_setting_of_estimates_is_the_estimate_of_its_flags(costs: JobCosts) -> None:
    assert costs.model is not None
    wanted = costs_of(replace(costs.model, recompute=EVERY_LAYER))
    setting = list(Setting.all_of(costs))[1]
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
    measured = list(Setting.all_of(JobCosts.of(slower, costs.model)))[1].costs
    estimated = list(Setting.all_of(costs))[1].costs
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
