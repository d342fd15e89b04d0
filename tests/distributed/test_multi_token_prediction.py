"""Models with multi-token prediction give the same update under every strategy as upstream's block
does unpacked, in one process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.hydraulis.data.packed_batch import PackedBatch, PredictedTokens, pack
from megatron.hydraulis.runtime import predictions
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.broken_rules import Rule, forgotten, wrong_with
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    MAIN_MODEL,
    SHORT_MODEL,
    SPLITS,
    changing,
    check_law,
    law_job,
    law_reference,
    waves,
)
from tests.support.models import Job, SmallModel, build_engine, packs_of_rank, use_fp64_loss

pytestmark = pytest.mark.distributed

_AGAIN: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1 / 16,
    "moe_router_load_balancing_type": "none",
}
_LATENTS: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 9,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8,
    "kv_channels": 8,
    "rope_type": "rope",
}


def _model(model: SmallModel = SHORT_MODEL, number: int = 1, **variant: Any) -> SmallModel:
    given = {"mtp_num_layers": number, "mtp_loss_scaling_factor": 0.4} | variant
    return replace(model, variant=tuple(given.items()))


MODELS = {
    "one": _model(),
    "two, tied": _model(replace(SHORT_MODEL, tied=True), 2),
    "two, no sequence parallelism": _model(
        replace(SHORT_MODEL, qk_layernorm=True, sequence_parallel=False), 2
    ),
    "recomputed": _model(replace(SHORT_MODEL, tied=True), **_AGAIN),
    "experts": _model(**_EXPERTS),
    "latents": _model(replace(SHORT_MODEL, num_groups=8, qk_layernorm=True), **_LATENTS),
}
STRATEGIES = ("tp2cp2", "tp2@0,3+pp2@2,1", "tp2+2*tp1")
"""One for each iteration."""


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_same_update(name: str) -> None:
    check_law(changing(STRATEGIES, MODELS[name]), 4)


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [(2, "tp2"), (2, "pp2:3,1"), (2, "cp2"), (3, "pp2:1,3@2,0+tp1"), (4, "tp2pp2")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_strategy_gives_the_same_update(num_ranks: int, text: str, tied: bool) -> None:
    model = _model(replace(MAIN_MODEL, tied=tied))
    check_law(law_job(num_ranks, text, model), num_ranks)


def test_waves_give_the_same_update() -> None:
    check_law(waves(list(SPLITS.values()), MODELS["two, tied"]), 4)
    check_law(waves([SPLITS["2+1+1"]], MODELS["experts"], ep=4), 4)


def test_whole_experts_give_the_same_update() -> None:
    check_law(law_job(2, "cp2ep2", MODELS["experts"]), 2)
    check_law(law_job(4, "tp2ep2pp2", MODELS["experts"]), 4)


def test_predictions_change_the_update() -> None:
    plain = law_reference(SHORT_MODEL).parameters[-1]
    found = law_reference(MODELS["one"]).parameters[-1]
    for name, value in plain.items():
        assert abs(found[name] - value).max() > 1e-5, name


def _evaluated(job: Job) -> tuple[float, float, tuple[float, ...]]:
    """The loss of evaluation before and after, and what a step reports."""
    use_fp64_loss()
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    packs = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank)
    engine.set_training(False)
    before = engine.evaluate(strategy.name, packs, make_forward_step()).mean
    engine.set_training(True)
    own = packs_of_rank(
        strategy, job.assignments[0], job.batches[0], engine.rank, num_predictions=1
    )
    outcome = engine.train_step(strategy.name, own, make_forward_step())
    return before, outcome.loss.mean, outcome.prediction_losses


def test_evaluation_is_without_predictions() -> None:
    jobs = (law_job(2, "pp2", MODELS[name]) for name in ("one", "recomputed"))
    runs = [run for job in jobs for run in pool_of(2).run(_evaluated, job)]
    for evaluated, trained, of_predictions in runs:
        assert evaluated == pytest.approx(trained, rel=1e-12)
        assert len(of_predictions) == 1
        assert 3 < of_predictions[0] < 6


def _over_borders(*given: Any, **named: Any) -> PackedBatch:
    """Predictions that go on into the next sequence of the row."""
    found = pack(*given, **named)
    rows = found.labels, found.labels.roll(-1), found.weights.roll(-1)
    return replace(found, predictions=(PredictedTokens(*rows),))


def _without_ratio(*given: Any) -> None:
    """Losses enter by the main loss's weights alone."""
    predictions.begin_predictions(*given)
    role, _, config, _ = given
    if isinstance(role.model, predictions.PredictingGPTModel):
        factor = config.mtp_loss_scaling_factor
        role.model.prediction_scales = torch.full_like(role.model.prediction_scales, factor)


def _patched(target: str, instead: Any) -> AbstractContextManager[Any]:
    return patch(target, instead)


BROKEN: dict[str, tuple[Rule, int, str]] = {
    "predictions over borders": (
        partial(_patched, "tests.support.models.pack", _over_borders),
        1,
        "tp1",
    ),
    "sums of other weights": (
        partial(_patched, f"{RuntimeEngine.__module__}.begin_predictions", _without_ratio),
        2,
        "2*tp1",
    ),
    "embedding of the last stage forgotten": (partial(forgotten, r"^embedding\.", 1), 2, "pp2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    rule, num_ranks, text = BROKEN[name]
    wrong = wrong_with(rule, num_ranks, text, MODELS["one"])
    assert "embedding.word_embeddings.weight" in wrong
    if "embedding" in name:
        assert len(wrong) == 1


def test_the_loss_of_a_layer_is_that_which_upstream_logs() -> None:
    expected = law_reference(MODELS["two, tied"]).prediction_losses
    assert np.shape(expected) == (3, 2)
    assert all(3 < loss < 6 for losses in expected for loss in losses)
