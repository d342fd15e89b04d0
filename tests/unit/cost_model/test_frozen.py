"""What a model provider freezes, in memory, times and messages; `test_adapters.py` has adapters."""

from dataclasses import replace

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, Recompute
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen, StageLayers
from megatron.hydraulis.runtime.catalogue import frozen_parts
from megatron.hydraulis.strategy import Scheme, Strategy
from megatron.hydraulis.transfer.canonical import Unit, model_parameters
from tests.support.planning import LLAMA_7B
from tests.support.simulation import SMALL_SHAPE, regroup_costs

H100 = device_constants("h100")
FIRST = Frozen.parse(["embedding", "0-7"], LLAMA_7B)
ALL_BUT_LAST = Frozen.parse(["embedding", "0-30", "output"], LLAMA_7B)
MIDDLE = Frozen.parse(["4-7", "9", "output"], LLAMA_7B)


def model(frozen: Frozen) -> AnalyticCostModel:
    return AnalyticCostModel(shape=LLAMA_7B, device=H100, cluster=H100.cluster(8, 8), frozen=frozen)


@pytest.mark.parametrize("frozen", [NOTHING_FROZEN, FIRST, ALL_BUT_LAST, MIDDLE])
def test_parts_are_named_and_counted(frozen: Frozen) -> None:
    assert Frozen.parse(str(frozen).split(), LLAMA_7B) == frozen
    parameters = model_parameters(LLAMA_7B, frozen=frozen)
    assert frozen_parts(parameters) == frozen
    trained = sum(each.num_elements for each in parameters if not each.is_frozen)
    assert model(frozen).num_trained == trained
    assert model(frozen).num_frozen == LLAMA_7B.num_parameters - trained


def test_a_part_that_is_frozen_in_part_counts_as_trained() -> None:
    parameters = [
        replace(each, unit=each.unit.trained) if each.name.endswith("3.norm1") else each
        for each in model_parameters(SMALL_SHAPE, frozen=Frozen(frozenset({2, 3}), True))
    ]
    assert frozen_parts(parameters) == Frozen(frozenset({2}), True)
    positions = replace(parameters[0], name="positions", unit=Unit.first_stage())
    assert not frozen_parts([*parameters, positions]).embedding


@pytest.mark.parametrize("word", ["32", "3-2", "5-32", "layers", "-1"])
def test_a_part_that_the_model_has_not_is_refused(word: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"layers of 0 to 31, .* has '{word}'"):
        Frozen.parse(["embedding", word], LLAMA_7B)


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--frozen has all 32 layers, embedding and"):
        Frozen.parse(["output", "0-31", "embedding"], LLAMA_7B)


def test_adapters_freeze_all_and_go_without_a_list_of_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256"
    job = "--device h100 --num-ranks 8 --seq-length 256 --frozen 0 --lora-rank 2"
    assert main(["estimate", *model.split(), *job.split()]) == 2
    assert "--frozen is given with --lora-rank; remove --frozen" in capsys.readouterr().err


def test_layers_in_front_of_all_that_is_trained_have_no_backward() -> None:
    four = Scheme(pp=4)

    def stages(found: AnalyticCostModel) -> list[StageLayers]:
        return [found.stage_layers(four, stage) for stage in range(4)]

    assert stages(model(FIRST)) == [(0, 0, 8), *3 * [(8, 0, 0)]]
    assert stages(model(MIDDLE)) == [(4, 4, 0), (7, 1, 0), *2 * [(8, 0, 0)]]
    # Later stages receive a state that needs a gradient.
    assert stages(model(ALL_BUT_LAST)) == [(0, 0, 8), *2 * [(0, 8, 0)], (1, 7, 0)]
    # A recomputed module must have an input that needs one, if something in the stage does.
    again = replace(model(FIRST), recompute=EVERY_LAYER)
    assert stages(again)[0] == (0, 0, 8)
    assert again.stage_layers(Scheme(), 0) == (24, 8, 0)
    # Without the embedding, its gradient passes all layers.
    assert model(replace(FIRST, embedding=False)).stage_layers(four, 0) == (0, 8, 0)


def test_frozen_layers_have_one_product_in_the_backward_and_idle_ones_none() -> None:
    forward = model(FIRST).forward_terms(Scheme())
    found = [
        model(FIRST).stage_terms(Scheme(), layers, is_last=False)
        for layers in (StageLayers(1), StageLayers(0, 1), StageLayers(0, 0, 1))
    ]
    products = [terms["matmul"].per_token_s / forward["matmul"].per_token_s for terms in found]
    assert products == pytest.approx([3, 2, 1])
    assert found[2] == {
        **found[2],
        **{cause: term for cause, term in forward.items() if term.per_token_s},
    }
    assert found[0]["elementwise"].constant_s > found[1]["elementwise"].constant_s == 0
    times = [
        model(each).coefficients(Scheme()).b_ms_per_token
        for each in (NOTHING_FROZEN, MIDDLE, FIRST, ALL_BUT_LAST)
    ]
    assert times == sorted(times, reverse=True)
    share = [model(each).coefficients(Scheme()).forward_share for each in (FIRST, ALL_BUT_LAST)]
    assert 1 / 3 < share[0] < share[1] < 1


@pytest.mark.parametrize("frozen", [FIRST, ALL_BUT_LAST, MIDDLE])
def test_frozen_parts_have_no_gradients_on_any_stage(frozen: Frozen) -> None:
    memory = model(frozen).memory
    expected = 2 * LLAMA_7B.num_parameters + 4 * memory.num_trained
    for scheme in (Scheme(), Scheme(pp=4)):
        stages = (memory.role_bytes(scheme, stage) for stage in range(scheme.pp))
        assert sum(stages) == pytest.approx(expected)


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(tp=4), Scheme(cp=8, fs=8), Scheme(tp=2, pp=2)])
@pytest.mark.parametrize("recompute", [Recompute(), EVERY_LAYER])
def test_more_tokens_fit(scheme: Scheme, recompute: Recompute) -> None:
    limits = [
        replace(model(each), recompute=recompute).max_tokens(scheme)
        for each in (NOTHING_FROZEN, FIRST, ALL_BUT_LAST)
    ]
    assert limits == sorted(limits)
    assert limits[0] < limits[2]


def test_operations_that_mathematics_needs() -> None:
    entries, output = SMALL_SHAPE.num_matrix_parameters_per_layer, 64 * 32
    attention = 32 * 10**2
    frozen = Frozen.parse(["embedding", "0", "2", "output"], SMALL_SHAPE)
    found = frozen.causal_flops(SMALL_SHAPE, [10])
    of_token = (2 + 6 + 4 + 6) * entries + 4 * output
    assert found == pytest.approx(10 * of_token + (2 + 6 + 6 + 6) * attention)


def test_gradients_of_frozen_parts_do_not_travel() -> None:
    strategy = Strategy.parse("4*tp1", 4, ranks_per_node=2)
    costs = regroup_costs(4)
    frozen = Frozen.parse(["embedding", "0", "1"], SMALL_SHAPE)
    parameters = model_parameters(SMALL_SHAPE, frozen=frozen)
    num_frozen = sum(each.num_elements for each in parameters if each.is_frozen)
    of_all = costs.times(strategy).received_bytes
    found = replace(costs, frozen=frozen).times(strategy)
    assert found.skipped_bytes == pytest.approx(3 / 4 * 2 * num_frozen, rel=0.01)
    assert found.received_bytes == pytest.approx(of_all - 3 / 4 * (2 + 4) * num_frozen, rel=0.01)
