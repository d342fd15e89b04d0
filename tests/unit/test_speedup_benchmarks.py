"""Distributions, cost models and tables of the benchmarks that simulate, on known data."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import propose, speedup_ladder
from benchmarks.context_balance import cost_profile
from benchmarks.inputs import DATA
from benchmarks.speedup_ladder import LongTail
from megatron.hydraulis.simulator.ways import WAYS
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.terminal import table_text

REFERENCE = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))


def test_the_tail_of_the_distribution_falls_by_its_exponent() -> None:
    distribution = LongTail(median_tokens=400.0, sigma=1.0, tail_exponent=1.5)
    # Far in the tail a tenth as many documents are longer than 10^(1/1.5) times the length.
    near, far = distribution.quantiles(np.array([1 - 1e-4, 1 - 1e-5]))
    assert near > distribution.tail_tokens
    assert far / near == pytest.approx(10 ** (1 / 1.5), rel=1e-6)


def test_the_distribution_is_continuous_where_its_tail_begins() -> None:
    distribution = LongTail()
    lengths = distribution.quantiles(np.linspace(0.001, 0.999, 2000))
    assert (np.diff(lengths) > 0).all()
    near_border = lengths[np.abs(np.log(lengths / distribution.tail_tokens)) < 0.3]
    # Steps of equal probability grow smoothly: the density does not jump.
    steps = np.diff(near_border)
    assert (steps[1:] / steps[:-1]).max() < 1.1
    corpus = distribution.corpus(10_001)
    assert abs(np.median(corpus) / distribution.median_tokens - 1.0) < 0.05


@pytest.mark.parametrize("width", [1, 8, 64])
def test_flexsp_s_formulas_are_the_cost_model_s(width: int) -> None:
    profile = cost_profile(REFERENCE, "gpt-7b")
    constants = REFERENCE["models"]["gpt-7b"]
    lengths = [1024, 3072, 128]
    num_tokens = sum(lengths)
    work = sum(constants["a1"] * s * s + constants["a2"] * s for s in lengths) / width
    exchange = 0.0
    if width > 1:
        num_mb = 4 * 2 * 32 * 4096 * num_tokens * 2 / 2**20 / width
        exchange = num_mb / REFERENCE["alltoall_MB_per_ms"][str(width)]
    scheme = Scheme(cp=width)
    assert profile.coefficients(scheme).time_ms(lengths) == pytest.approx(
        work + exchange + constants["b1"]
    )
    states_mb = 7.1174468994 * 16 / 64 * 1024
    assert profile.max_tokens(scheme) == int((30 * 1024 - states_mb) / 4.480441895 * width)


def test_a_ladder_has_all_steps_and_no_step_is_slower() -> None:
    options = speedup_ladder._parser().parse_args(["--iterations", "1"])
    corpus = speedup_ladder.corpora(options.median, options.tail_exponent)[1]
    with speedup_ladder.Progress(disable=True) as progress:
        ways, results = speedup_ladder.simulate(corpus, options, progress)
    assert ways.limit == 32_768
    by_name = {result.name: result.time_s for result in results}
    times_s = [by_name[way] for way, _ in speedup_ladder.LADDER]
    for slower_s, faster_s in itertools.pairwise(times_s):
        assert faster_s <= 1.01 * slower_s
    assert speedup_ladder.ladder_table(corpus, results).row_count == len(WAYS)


def test_cases_have_the_sizes_and_widths_of_their_jobs() -> None:
    for name in ("7B A800", "8B h100-80g"):
        profile, memory = propose.case_profile(name, 16)
        assert profile.regroup is not None
        assert profile.regroup.cluster.num_ranks == memory.num_ranks == 16
        schemes = {row.scheme: row for row in profile.schemes}
        assert all(scheme.num_ranks <= 16 for scheme in schemes)
        # The published profile has no cp; of the estimate all rows are estimated.
        assert schemes[Scheme(tp=2, cp=4)].is_assumed is (name == "7B A800")


def test_the_table_of_cases_ends_with_mean_and_least_gain() -> None:
    kinds = (propose.NOTHING_HIDDEN, propose.BY_RULE)
    results = [
        propose.CaseResult(
            name=str(gain),
            gains=dict.fromkeys(kinds, (gain, 2 * gain)),
            of_ceiling=0.8,
            regrouping=0.1,
            static="2*tp1",
            pool="2*tp1 tp2",
            cpu_s=1.0,
        )
        for gain in (1.0, 1.2)
    ]
    text = table_text(propose.case_table(results), 200)
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert rows["mean"].count("1.100") == 2
    assert rows["least"].count("1.000") >= 2
    assert "2.200" in rows["mean"]
