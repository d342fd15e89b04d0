"""Models with experts give the same update under every strategy as on one process."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime import experts as experts_module
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.experts import RouterState, SequenceRouter
from megatron.hydraulis.runtime.outcome import RoutingFigures
from megatron.hydraulis.transfer.canonical import Contribution
from tests.support.bf16_error import MOST_OF_ONE_PROCESS
from tests.support.broken_rules import Rule, described, forgotten, run_broken, wrong_with
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    LENGTHS,
    MAIN_MODEL,
    SPLITS,
    changing,
    check_law,
    law_cases,
    law_job,
    law_reference,
    waves,
)
from tests.support.models import (
    Job,
    RankRun,
    SmallModel,
    build_engine,
    packs_of_rank,
    use_fp64_loss,
)
from tests.support.reference import initial_parameters
from tests.support.routing_error import rounded_runs

pytestmark = pytest.mark.distributed


def _model(**variant: Any) -> SmallModel:
    experts = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    return replace(MAIN_MODEL, num_layers=2, variant=tuple((experts | variant).items()))


MODELS = {
    "top 1": _model(moe_router_topk=1, moe_router_pre_softmax=True),
    "top 2, gathered": _model(moe_token_dispatcher_type="allgather"),
    "top 8 of 16": _model(num_moe_experts=16, moe_router_topk=8, moe_router_dtype="fp64"),
    "shared experts and a gate": _model(
        moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True
    ),
    "sigmoid scores in groups": _model(
        num_moe_experts=8,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1 / 16,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
    "balanced, with z-loss": _model(
        num_moe_experts=8,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.1,
    ),
    "balanced sigmoid scores": _model(
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.3,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
    "every second layer dense": _model(
        moe_layer_freq=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1 / 16,
    ),
    "the first layer dense": _model(moe_layer_freq=(0, 1), moe_token_dispatcher_type="allgather"),
    "biases, as GPT-OSS": replace(
        _model(
            activation_func=quick_gelu,
            glu_linear_offset=1.0,
            activation_func_clamp_value=0.05,
            softmax_type="learnable",
            window_size=(6, 0),
            window_attn_skip_freq=2,
        ),
        bias=True,
    ),
    "recomputed": _model(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}
STRATEGIES = (
    ("tp2cp2", "tp2@0,3+pp2@2,1", "tp2+2*tp1"),
    ("cp2pp2", "tp4", "pp2:1,1+cp2"),
    ("tp2pp2", "2*cp2", "tp2+idle+tp1"),
    ("2*pp2", "cp4", "4*tp1"),
)
"""One for each iteration of a run."""
WHOLE_EXPERTS = (
    ("tp2cp2ep4", "tp2ep2@3,0+pp2@2,1", "cp2ep2+tp2"),
    ("tp2cp2ep2", "tp2ep2+2*tp1", "tp4ep2"),
    ("cp2ep2pp2", "2*tp2ep2", "cp4ep4"),
    ("tp4ep4", "cp4ep2", "tp2ep2pp2"),
    ("2*cp2ep2", "tp2cp2ep4", "tp2ep2+idle+tp1"),
)
"""Likewise, where ranks hold whole experts in some replicas, and some of them the same."""


@pytest.mark.parametrize(("name", "strategies"), law_cases(MODELS, STRATEGIES + WHOLE_EXPERTS))
def test_models_with_experts_give_the_same_update(name: str, strategies: tuple[str, ...]) -> None:
    check_law(changing(strategies, MODELS[name]), 4)


@pytest.mark.parametrize(
    "name", [pytest.param("top 2, gathered", marks=pytest.mark.nightly), "balanced, with z-loss"]
)
def test_experts_give_the_same_update_in_waves(name: str) -> None:
    check_law(waves(list(SPLITS.values()), MODELS[name]), 4)


@pytest.mark.parametrize("name", ["top 2, gathered", "balanced, with z-loss"])
@pytest.mark.parametrize("ep", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_whole_experts_give_the_same_update_in_waves(name: str, ep: int) -> None:
    """Columns have rows of different lengths, and some have padding only."""
    check_law(waves(list(SPLITS.values()), MODELS[name], ep=ep), 4)


def test_whole_experts_give_the_same_update_in_waves_of_pipelines() -> None:
    """Proposed pools have such strategies."""
    splits = [[(0, 1), (1, 1)], [(0, 2)]]
    check_law(waves(splits, MODELS["balanced, with z-loss"], ep=2, pp=2), 4)


@pytest.mark.nightly
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_whole_experts_give_the_same_update_in_a_wave_of_eight(ep: int) -> None:
    splits = [[(0, 4), (4, 2), (6, 1), (7, 1)], [(0, 1), (1, 1), (2, 2), (4, 4)]]
    check_law(waves(splits, MODELS["balanced, with z-loss"], ep=ep), 8)


BF16_STRATEGIES = ("tp2+2*tp1", "tp4", "tp2cp2", "tp2cp2ep4")
BF16_MODELS = ("top 2, gathered", "top 8 of 16", "balanced, with z-loss")


@pytest.mark.parametrize(
    ("names", "texts", "num_draws", "is_free"),
    [
        pytest.param(BF16_MODELS[:1], BF16_STRATEGIES[-1:], 1, False, id="an example"),
        *(
            pytest.param(
                *(BF16_MODELS, BF16_STRATEGIES, 8, is_free),
                marks=(pytest.mark.nightly, pytest.mark.timeout(600)),
                id="chosen experts" if is_free else "given experts",
            )
            for is_free in (False, True)
        ),
    ],
)
def test_bf16_adds_little(
    names: tuple[str, ...], texts: tuple[str, ...], num_draws: int, is_free: bool
) -> None:
    for name in names:
        model = replace(MODELS[name], dtype=torch.bfloat16)
        alone = rounded_runs(law_job(1, "tp1", model), num_draws, is_free=is_free)
        for text in texts:
            found = rounded_runs(law_job(4, text, model), num_draws, is_free=is_free)
            ratio = found.worst_ratio(alone)
            of_loss = max(abs(np.divide(found.losses, alone.losses) - 1.0))
            print(
                f"{name}, {text}: {ratio:.2f} x the error of one process, whose tokens pass other "
                f"experts in {alone.share_changed:.2%}, here in {found.share_changed:.2%}; losses "
                f"differ by {of_loss:.3%}"
            )
            assert ratio <= MOST_OF_ONE_PROCESS
            assert 0 < found.share_changed < 0.05 if is_free else found.share_changed == 0
            assert of_loss < 0.005


def _wrong_with(rule: Rule, num_ranks: int, text: str, matching: str) -> tuple[set[str], set[str]]:
    """The parameters with wrong gradients, and those whose names match."""
    model = MODELS["shared experts and a gate"]
    wrong = wrong_with(rule, num_ranks, text, model)
    return wrong, {name for name in law_reference(model).gradients[0] if re.search(matching, name)}


_REPLICATED = {"contribution": Contribution.REPLICATED}


@pytest.mark.parametrize(
    ("rule", "num_ranks", "text", "expected"),
    [
        pytest.param(
            partial(described, r"router\.|gate_weight", **_REPLICATED),
            *(2, "tp2ep2", r"router\.|gate_weight"),
            id="routers and gates sent by one tp rank",
        ),
        pytest.param(
            *(partial(forgotten, r"local_experts|router\.", 3), 4, "tp4ep2"),
            r"local_experts\.[23]\.|router\.",
            id="routers and whole experts not sent by a tp rank",
        ),
        pytest.param(
            *(partial(forgotten, r"experts|router\.", 3), 4, "cp4ep2"),
            r"local_experts\.[23]\.|shared_experts|router\.",
            id="routers, whole and shared experts not sent by a cp rank",
        ),
    ],
)
def test_a_broken_rule_of_contribution_is_found(
    rule: Rule, num_ranks: int, text: str, expected: str
) -> None:
    wrong, names = _wrong_with(rule, num_ranks, text, expected)
    assert wrong == names


def test_gates_of_experts_that_are_not_cut_apart_are_found() -> None:
    wrong, names = _wrong_with(partial(described, "experts.*fc1", parts=()), 2, "tp2", "experts")
    assert names <= wrong


def test_weights_of_tokens_do_not_weigh_what_balances_experts() -> None:
    """Both parts of the gradient are means, so an eighth of all weights changes neither."""
    job = law_job(2, "tp2", MODELS["balanced, with z-loss"])
    lighter = replace(
        job, weights=tuple(tuple(each / 8 for each in batch) for batch in job.weights)
    )
    check_law(lighter, 2)


@pytest.mark.parametrize(
    "rule",
    [
        partial(patch, f"{experts_module.__name__}.dist"),
        partial(patch, "megatron.hydraulis.runtime.engine.scale_balancing"),
    ],
    ids=["counts of a rank", "not scaled"],
)
def test_a_wrong_balancing_loss_is_found(rule: Rule) -> None:
    wrong = wrong_with(rule, 2, "cp2", MODELS["balanced, with z-loss"])
    assert {f"decoder.layers.{layer}.mlp.router.weight" for layer in range(2)} <= wrong


def _count_padding_too(router: SequenceRouter, chosen: torch.Tensor, padding_mask: Any) -> None:
    if torch.is_grad_enabled():
        assert router.state is not None
        router.state.counts[router.layer] += chosen.sum(dim=0)


def _propose_by_own(
    routers: RouterState, _: torch.Tensor, propose: Any = RouterState.propose
) -> Any:
    return propose(routers, routers.sums)


_COUNTS_WITH_PADDING = partial(
    patch.object, SequenceRouter, "_apply_expert_bias", _count_padding_too
)


@pytest.mark.parametrize(
    "rule",
    [partial(patch.object, RouterState, "propose", _propose_by_own), _COUNTS_WITH_PADDING],
    ids=["of a rank", "with padding"],
)
def test_biases_by_wrong_counts_are_found(rule: Rule) -> None:
    job = law_job(2, "cp2", MODELS["sigmoid scores in groups"])
    expected = law_reference(job.model).biases
    runs: list[RankRun] = pool_of(2).run(run_broken, job, rule)
    assert not all(np.array_equal(run.biases, expected) for run in runs)


def _call_twice(job: Job) -> str:
    engine = build_engine(job)
    engine.forward_backward(job.strategies[0], [], make_forward_step())
    with pytest.raises(ConfigurationError) as caught:
        engine.forward_backward(job.strategies[0], [], make_forward_step())
    engine.discard_gradients()
    return str(caught.value)


def test_a_second_call_before_an_update_is_refused_where_routers_balance() -> None:
    job = law_job(1, "tp1", MODELS["balanced, with z-loss"])
    (message,) = pool_of(1).run(_call_twice, job)
    assert "this is call 2 since the last update; give all sequences to one call" in message


def _evaluate_and_train(job: Job) -> tuple[list[float], list[RoutingFigures | None]]:
    engine = build_engine(job)
    (strategy,) = engine.pool.strategies
    forward_step, routers = make_forward_step(), engine.routers
    assert routers is not None
    assert routers.biases is not None
    sums, figures = [], []
    for weight in (1.0, 0.0):
        weights = tuple(np.full_like(each, weight) for each in job.weights[0])
        mine = packs_of_rank(
            strategy, job.assignments[0], job.batches[0], engine.rank, weights=weights
        )
        figures.append(engine.train_step(strategy.name, mine, forward_step).routing)
        engine.evaluate(strategy.name, mine, forward_step)
        sums += [routers.counts.sum().item(), routers.biases.abs().sum().item()]
    return sums, figures


def test_only_tokens_that_train_move_the_biases_of_routers() -> None:
    """Padding, evaluation, recomputation and batches without trained tokens do not."""
    job = law_job(2, "cp2", MODELS["sigmoid scores in groups"])
    found = pool_of(2).run(_evaluate_and_train, job)
    assert found[0][1] == found[1][1]
    num_chosen = sum(LENGTHS[0]) * 2 * 2  # layers, experts of a token
    assert sum(count for (count, *_), _ in found) == num_chosen
    for (_, moved, _, moved_later), (figures, without_training) in found:
        assert moved == moved_later > 0
        assert without_training is None
        assert figures is not None
        assert 1 < figures.worst_load < 8
        assert figures.bias_range == (-1 / 16, 1 / 16)
        assert figures.balancing_loss is figures.z_loss is None


def test_routers_are_initialised_as_matrices() -> None:
    """Upstream makes them in fp32 and converts them, by which the recipe could be lost."""
    for name, value in initial_parameters(MODELS["shared experts and a gate"], seed=1).items():
        if name.endswith(("router.weight", "gate_weight")):
            assert 0.05 < float(value.std()) < 0.2, name


def _tensors_that_dispatchers_keep(job: Job) -> list[str]:
    use_fp64_loss()
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    batches = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank)
    engine.train_step(strategy.name, batches, make_forward_step())
    model = engine.runtime_of(strategy.name).model
    assert model is not None
    layers = [each for each in model.model.modules() if isinstance(each, MoELayer)]
    assert layers
    return [
        name
        for layer in layers
        for name, value in vars(layer.token_dispatcher).items()
        if isinstance(value, torch.Tensor) and not name.endswith("_by_local_experts")
    ]


def test_dispatchers_keep_nothing_of_a_row() -> None:
    (kept,) = pool_of(1).run(
        _tensors_that_dispatchers_keep, law_job(1, "tp1", MODELS["recomputed"])
    )
    assert not kept
