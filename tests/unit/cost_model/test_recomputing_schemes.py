"""Schemes that recompute every layer, ``tp8r``: times and limits as if the job did."""

from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, Recompute
from megatron.hydraulis.errors import StrategyError
from tests.unit.cost_model.test_shared_weights import model, scheme

SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))


@pytest.mark.parametrize("text", ["tp2", "tp2cp2", "tp2pp2", "cp4fs", "cp2fs4"])
@pytest.mark.parametrize("te", [False, True])
def test_a_scheme_recomputes_as_a_job_does(text: str, te: bool) -> None:
    usual = model(recompute=SELECTIVE, has_te_attention=te, has_te_layers=te, cp_comm_type="auto")
    recomputed = replace(usual, recompute=EVERY_LAYER)
    asked = replace(scheme(text), recomputes=True)
    assert usual.coefficients(asked) == recomputed.coefficients(scheme(text))
    assert usual.max_tokens(asked) == recomputed.max_tokens(scheme(text))
    assert usual.max_tokens(asked) > usual.max_tokens(scheme(text))
    assert usual.coefficients(asked).time_ms([8192]) > usual.coefficients(scheme(text)).time_ms(
        [8192]
    )


def test_schemes_that_recompute_are_offered_if_asked_and_where_they_hold_more() -> None:
    usual = model(num_ranks=16)
    without, offered = (
        [row.scheme for row in estimated_profile(each).schemes]
        for each in (usual, replace(usual, offer_recompute=True))
    )
    assert not any(each.recomputes for each in without)
    assert [each for each in offered if not each.recomputes] == without
    assert {"tp8r", "tp4pp2r", "cp8fsr", "fs8r"} <= set(map(str, offered))
    everywhere = replace(usual, offer_recompute=True, recompute=EVERY_LAYER)
    assert not any(row.scheme.recomputes for row in estimated_profile(everywhere).schemes)


def test_rows_follow_from_those_without_but_not_the_reverse() -> None:
    profile = estimated_profile(model(), [scheme("tp4")], keeps_all=True)
    (row,) = profile.schemes
    slower = replace(row, coefficients=row.coefficients.scaled(a=1.1, b=1.2))
    costs = JobCosts.of(replace(profile, schemes=(slower,)), model())
    expected = model().coefficients(scheme("tp4r")).scaled(a=1.1, b=1.2)
    assert costs.coefficients(scheme("tp4r")).time_ms([999]) == pytest.approx(
        expected.time_ms([999])
    )
    assert costs.max_tokens(scheme("tp4r")) == model().max_tokens(scheme("tp4r"))
    recomputed = estimated_profile(model(), [scheme("tp4r")])
    with pytest.raises(StrategyError, match="tp4"):
        JobCosts.of(recomputed, model()).coefficients(scheme("tp4"))
