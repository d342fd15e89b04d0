"""The contribution of TP ranks to a gradient is marked or known, never guessed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.library.building import frozen_by
from megatron.hydraulis.runtime.catalogue import MARK, catalogue
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.transfer.canonical import Contribution, ParameterSpec, Unit
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel
from tests.unit.flags.argument_command import parse

LAYER = "decoder.layers.0."


def add_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """A new parameter of a model, in modules that the name implies."""
    parameter = nn.Parameter(torch.empty(8).fill_(1.0))
    *path, last = name.split(".")
    module = model
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
    return parameter


def contribution(
    name: str,
    *marks: tuple[str, Any],
    sequence_parallel: bool = False,
    tensor_parallel: bool = True,
) -> Contribution:
    """The contribution to a model's only parameter with this name and these attributes."""

    def provider(**_: Any) -> nn.Module:
        model = nn.Module()
        parameter = add_parameter(model, name)
        for key, value in marks:
            setattr(parameter, key, value)
        return model

    definition = SmallModel(sequence_parallel=sequence_parallel).definition()
    (entry,) = catalogue(
        replace(definition, model_provider=provider), tensor_parallel=tensor_parallel
    )
    assert entry.spec.name == name
    return entry.spec.contribution


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("module", ["self_attention", "cross_attention", "mlp"])
def test_an_unmarked_parameter_among_cut_ones_is_refused(
    module: str, sequence_parallel: bool
) -> None:
    name = f"{LAYER}{module}.query_norm.weight"
    message = f"'{name}' is not cut over TP ranks.*{MARK} to 'partial' or 'replicated'"
    with pytest.raises(ConfigurationError, match=message):
        contribution(name, ("sequence_parallel", False), sequence_parallel=sequence_parallel)


def test_a_norm_without_a_sequence_parallel_mark_is_refused() -> None:
    name = f"{LAYER}input_layernorm.weight"
    with pytest.raises(ConfigurationError, match="is not marked sequence_parallel"):
        contribution(name, sequence_parallel=True)
    marked = contribution(name, ("sequence_parallel", True), sequence_parallel=True)
    assert marked is Contribution.PARTIAL
    assert contribution(name) is Contribution.REPLICATED


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_mark_decides(sequence_parallel: bool) -> None:
    name = f"{LAYER}self_attention.head_scale"
    for mark, wanted in (
        ("partial", Contribution.PARTIAL),
        ("replicated", Contribution.REPLICATED),
    ):
        found = contribution(name, (MARK, mark), sequence_parallel=sequence_parallel)
        assert found is wanted
    with pytest.raises(ConfigurationError, match="= 'summed'; it can be 'partial' or 'replicated'"):
        contribution(name, (MARK, "summed"))


def test_without_tensor_parallelism_no_mark_is_needed() -> None:
    name = f"{LAYER}mlp.router.weight"
    assert contribution(name, tensor_parallel=False) is Contribution.REPLICATED


def test_upstreams_own_parameters_are_known() -> None:
    assert contribution(f"{LAYER}self_attention.q_layernorm.weight") is Contribution.PARTIAL
    assert contribution(f"{LAYER}self_attention.linear_proj.bias") is Contribution.REPLICATED
    assert contribution(f"{LAYER}mlp.linear_fc2.bias") is Contribution.REPLICATED
    positions = contribution("embedding.position_embeddings.weight", sequence_parallel=True)
    assert positions is Contribution.REPLICATED


NAMES = [
    *("embedding.word_embeddings.weight", f"{LAYER}mlp.a", f"{LAYER}mlp.b", f"{LAYER}mlp.c"),
    *(f"{LAYER}mlp.d", "output_layer.weight"),
]


def specs_of_provider(change: Callable[[Any], object]) -> list[ParameterSpec]:
    """The catalogue of a provider that changes its model."""

    def provider(**_: Any) -> nn.Module:
        model = nn.Module()
        for name in NAMES:
            add_parameter(model, name)
        change(model)
        return model

    definition = replace(SmallModel().definition(), model_provider=provider)
    return [entry.spec for entry in catalogue(definition, tensor_parallel=False)]


def test_without_tp_a_provider_may_have_parameters_without_marks(tmp_path: Path) -> None:
    def provider(**_: Any) -> nn.Module:
        model = nn.Module()
        for name in NAMES:
            add_parameter(model, name)
        model.get_parameter(NAMES[0]).requires_grad_(False)
        return model

    alone, together = (
        parse(tmp_path, "--strategy", text, num_ranks=2) for text in ("2*tp1", "tp2")
    )
    assert frozen_by(provider, alone) == Frozen(embedding=True)
    with pytest.raises(ConfigurationError, match="is not cut over TP ranks"):
        frozen_by(provider, together)


def test_without_tp_biases_of_experts_are_added_up() -> None:
    """Ranks that hold other experts send theirs, whatever the flag for tp ranks."""
    variant = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
    model = SmallModel(bias=True, sequence_parallel=False, variant=tuple(variant.items()))
    specs: list[ParameterSpec] = pool_of(1).run(_specs_without_tp, model.definition())[0]
    biases = [each for each in specs if each.name.endswith("linear_fc2.bias")]
    assert {each.contribution for each in biases} == {Contribution.PARTIAL}
    assert {each.experts for each in biases} == {(i, i + 1) for i in range(4)}


def _specs_without_tp(definition: ModelDefinition) -> list[ParameterSpec]:
    entries = catalogue(definition, tensor_parallel=False, expert_parallel=True)
    return [entry.spec for entry in entries]


def test_what_a_provider_freezes_is_frozen() -> None:
    def freeze(model: Any) -> None:
        model.embedding.requires_grad_(False)
        model.get_parameter(NAMES[2]).requires_grad_(False)

    specs = specs_of_provider(freeze)
    assert [spec.name for spec in specs if spec.is_frozen] == [NAMES[0], NAMES[2]]
    assert specs[0].unit == Unit.embedding().frozen
    assert specs[1].unit == Unit.layer(0)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigurationError, match=r"hooks on 1 of 6: output_layer\.weight"):
        specs_of_provider(
            lambda model: getattr(model.output_layer.weight, method)(lambda gradient: None)
        )
