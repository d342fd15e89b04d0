"""The analytic cost model against published measurements, hand calculation, and scaling."""

import math
from dataclasses import replace

import pytest

from benchmarks.layout_calibration import KERNEL_S
from megatron.hydraulis.cost_model import (
    AnalyticCostModel,
    Coefficients,
    ModelShape,
    Recompute,
    device_constants,
)
from megatron.hydraulis.cost_model.analytic import KERNELS
from megatron.hydraulis.cost_model.device import DEVICE_NAMES, DEVICES, DeviceConstants, Precision
from megatron.hydraulis.cost_model.host import LAUNCH_S, LOCAL_LAYERS, TE_LAYERS
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B, LLAMA_32B
from tests.unit.test_model_shape import QWEN3_30B_A3B

A800 = device_constants("a800-80")
AS_MEASURED = replace(A800, kernel_s=KERNEL_S)
"""With the constant cost of a layer of the software that the measurements are of."""
NUM_LAUNCHES = LOCAL_LAYERS.dense.num_launches
UNMEASURED = replace(A800, kernels=None, matmul_fraction=0.8, attention_fraction=0.6)
"""A device by its data sheet."""


# Time of a micro-batch on one stage, in ms a token (b) and ms (c), measured on A800-80G with 8
# GPUs a node for LLAMA_32B: PKU-DAIR/Hetu, examples/hydraulis/strategy/generate_strategy_32b.py
# (Apache-2.0, 2024), the code of arXiv 2412.07894.
MEASURED_32B = {
    (1, 4): (0.212596087, 35.9946816),
    (2, 1): (0.386957078, 156.200893),
    (2, 2): (0.213060059, 80.7166594),
    (2, 4): (0.106558744, 42.9448858),
    (4, 1): (0.238996833, 120.694765),
    (4, 2): (0.118301177, 65.4239196),
    (8, 1): (0.141411593, 122.910213),
    (8, 4): (0.0370804063, 25.442409),
    (16, 1): (0.102435387, 145.747611),
}
# ms per token²; the fits for small tp are too noisy for a comparison.
MEASURED_32B_ATTENTION = {
    (2, 4): 1.97033746e-06,
    (4, 1): 3.86950049e-06,
    (4, 2): 2.04563898e-06,
    (8, 1): 2.12548718e-06,
    (8, 4): 4.91076016e-07,
}


def model(
    shape: ModelShape = LLAMA_32B, num_ranks: int = 64, constants: DeviceConstants = A800
) -> AnalyticCostModel:
    cluster = constants.cluster(num_ranks, constants.most_ranks_per_node or 8)
    return AnalyticCostModel(shape=shape, device=constants, cluster=cluster)


@pytest.mark.parametrize(("degrees", "measured"), MEASURED_32B.items(), ids=str)
def test_near_published_measurements(
    degrees: tuple[int, int], measured: tuple[float, float]
) -> None:
    tp, pp = degrees
    predicted = replace(model(), device=AS_MEASURED).coefficients(Scheme(tp=tp, pp=pp))
    b_ms_per_token, c_ms = measured
    assert predicted.b_ms_per_token == pytest.approx(b_ms_per_token, rel=0.2)
    assert predicted.c_ms == pytest.approx(c_ms, rel=0.35)


@pytest.mark.parametrize("degrees", MEASURED_32B_ATTENTION, ids=str)
@pytest.mark.parametrize("num_tokens", [4096, 16384])
def test_long_sequences_near_published_measurements(
    degrees: tuple[int, int], num_tokens: int
) -> None:
    tp, pp = degrees
    b_ms_per_token, c_ms = MEASURED_32B[degrees]
    per_token_ms = MEASURED_32B_ATTENTION[degrees] * num_tokens + b_ms_per_token
    predicted = replace(model(), device=AS_MEASURED).coefficients(Scheme(tp=tp, pp=pp))
    predicted_ms = predicted.time_ms([num_tokens])
    assert predicted_ms == pytest.approx(per_token_ms * num_tokens + c_ms, rel=0.03)


def test_one_rank_by_hand() -> None:
    coefficients = model(LLAMA_7B, constants=UNMEASURED).coefficients(Scheme())
    num_entries = LLAMA_7B.num_parameters - LLAMA_7B.num_embedding_parameters
    num_entries -= (2 * LLAMA_7B.num_layers + 1) * LLAMA_7B.hidden_size  # norms
    num_flops = 6 * num_entries + 2 * LLAMA_7B.num_embedding_parameters  # logits twice
    products_ms = 1e3 * num_flops / (UNMEASURED.peak_flops_per_s * UNMEASURED.matmul_fraction)
    hidden, ffn, vocabulary = 4096, LLAMA_7B.ffn_hidden_size, LLAMA_7B.vocab_size
    row = KERNELS.hidden_passes * hidden + KERNELS.query_passes * 3 * hidden
    row += KERNELS.ffn_passes * ffn
    moved = 32 * 3 * row + KERNELS.logit_passes * vocabulary
    moved_ms = 2e3 * moved / UNMEASURED.memory_bytes_per_s
    attention = 3.5 * 32 * 2 * hidden
    a_ms = 1e3 * attention / (UNMEASURED.peak_flops_per_s * UNMEASURED.attention_fraction)
    assert coefficients.a_ms_per_token2 == pytest.approx(a_ms)
    short_ms = a_ms * KERNELS.half_rate_tokens
    assert coefficients.b_ms_per_token == pytest.approx(products_ms + moved_ms + short_ms)
    weights = KERNELS.weight_passes * 2 * LLAMA_7B.num_matrix_parameters_per_layer
    layer_s = NUM_LAUNCHES * UNMEASURED.kernel_s + weights / UNMEASURED.memory_bytes_per_s
    assert coefficients.c_ms == pytest.approx(1e3 * 32 * layer_s)


def test_a_stage_is_as_slow_as_its_longest() -> None:
    even = model(LLAMA_7B).coefficients(Scheme(pp=2))
    uneven = model(LLAMA_7B).coefficients(Scheme(pp=2, layers=(24, 8)))
    assert uneven.a_ms_per_token2 == pytest.approx(1.5 * even.a_ms_per_token2)
    # The output layer counts where it makes the last stage the slowest.
    wide = replace(LLAMA_7B, vocab_size=512_000)
    first, last = (
        model(wide).coefficients(Scheme(pp=2, layers=layers)).b_ms_per_token
        for layers in ((20, 12), (12, 20))
    )
    assert last > first


def test_tp_across_nodes_costs_more_than_inside() -> None:
    inside = AnalyticCostModel(shape=LLAMA_7B, device=A800, cluster=A800.cluster(16, 16))
    across = AnalyticCostModel(shape=LLAMA_7B, device=A800, cluster=A800.cluster(16, 4))
    scheme = Scheme(tp=16)
    assert across.coefficients(scheme).b_ms_per_token > inside.coefficients(scheme).b_ms_per_token
    assert across.coefficients(scheme).c_ms > inside.coefficients(scheme).c_ms


def test_cp_moves_keys_and_values_only() -> None:
    grouped = replace(LLAMA_7B, num_query_groups=4)
    tp, cp = (model(grouped).coefficients(scheme) for scheme in (Scheme(tp=8), Scheme(cp=8)))
    assert cp.b_ms_per_token < tp.b_ms_per_token
    # With few heads, a rank waits longer for the last block of each of them.
    assert 1.0 < tp.a_ms_per_token2 / cp.a_ms_per_token2 < 1.1


def test_recomputing_adds_a_forward() -> None:
    scheme = Scheme(tp=2, cp=2)
    plain = model(LLAMA_7B).coefficients(scheme)
    again = replace(model(LLAMA_7B), recompute=EVERY_LAYER).coefficients(scheme)
    # The backward of attention takes 2.5 times the forward.
    assert again.a_ms_per_token2 == pytest.approx(plain.a_ms_per_token2 * 4.5 / 3.5)
    assert plain.b_ms_per_token < again.b_ms_per_token < plain.b_ms_per_token * 3 / 2


def test_recomputing_by_hand_on_one_stage() -> None:
    scheme = Scheme(pp=4)  # 8 layers a stage; no messages of tp and cp
    plain = model(LLAMA_7B, constants=UNMEASURED).coefficients(scheme)
    matrix_ms = 2e3 / (UNMEASURED.peak_flops_per_s * UNMEASURED.matmul_fraction)
    forward = model(LLAMA_7B, constants=UNMEASURED).forward_terms(scheme)
    short_ms = 1e3 * forward["attention"].per_token_s
    layer_ms = LLAMA_7B.num_matrix_parameters_per_layer * matrix_ms
    layer_ms += 1e3 * forward["elementwise"].per_token_s + short_ms
    mlp_ms = LLAMA_7B.num_mlp_parameters_per_layer * matrix_ms
    moved = KERNELS.ffn_passes * LLAMA_7B.ffn_hidden_size
    mlp_ms += 2e3 * moved / UNMEASURED.memory_bytes_per_s
    cases = {
        Recompute(granularity="selective", modules=("core_attn",)): (8 * short_ms, 8),
        Recompute(granularity="selective", modules=("mlp",)): (8 * mlp_ms, 0),
        Recompute(granularity="full", method="uniform", num_layers=3): (8 * layer_ms, 8),
        Recompute(granularity="full", method="block", num_layers=3): (3 * layer_ms, 3),
        Recompute(granularity="full", method="block", num_layers=9): (8 * layer_ms, 8),
    }
    for recompute, (more_ms, num_attentions) in cases.items():
        again = replace(model(LLAMA_7B, constants=UNMEASURED), recompute=recompute).coefficients(
            scheme
        )
        assert again.b_ms_per_token - plain.b_ms_per_token == pytest.approx(more_ms), recompute
        ratio = again.a_ms_per_token2 / plain.a_ms_per_token2
        assert ratio == pytest.approx(1 + num_attentions / 28), recompute


def test_messages_of_recomputed_operations_are_sent_again() -> None:
    scheme = Scheme(tp=4, cp=2)
    link_s = (
        KERNELS.collective_latencies
        * model(LLAMA_7B, constants=UNMEASURED).cluster.collective(4).latency_s
    )
    launch_s = NUM_LAUNCHES * UNMEASURED.kernel_s / 3
    ring_s = model(LLAMA_7B, constants=UNMEASURED).cluster.point_to_point(8).latency_s
    plain = model(LLAMA_7B, constants=UNMEASURED).coefficients(scheme).c_ms
    for modules, more_s in ((("mlp",), 2 * link_s), (("core_attn",), ring_s)):
        selective = Recompute(granularity="selective", modules=modules)
        again = (
            replace(model(LLAMA_7B, constants=UNMEASURED), recompute=selective)
            .coefficients(scheme)
            .c_ms
        )
        assert again - plain == pytest.approx(32e3 * more_s, rel=1e-6)
    full = (
        replace(model(LLAMA_7B, constants=UNMEASURED), recompute=EVERY_LAYER)
        .coefficients(scheme)
        .c_ms
    )
    assert full - plain == pytest.approx(32e3 * (4 * link_s + ring_s + launch_s), rel=1e-6)


def test_the_host_binds_a_replica_and_not_the_device() -> None:
    scheme, dense = Scheme(pp=2), LOCAL_LAYERS.dense
    plain = model(LLAMA_7B)
    launch_ms = 1e3 * LAUNCH_S * dense.num_launches
    of_layer_ms = 1e3 * (dense.forward_s + dense.backward_s) + launch_ms
    assert plain.coefficients(scheme).host_ms == pytest.approx(16 * of_layer_ms)
    again_ms = 1e3 * dense.forward_s + launch_ms / 3
    again = replace(plain, recompute=EVERY_LAYER).coefficients(scheme)
    assert again.host_ms == pytest.approx(16 * (of_layer_ms + again_ms))
    half = replace(
        plain, recompute=Recompute(granularity="full", method="block", num_layers=8)
    ).coefficients(scheme)
    assert half.host_ms == pytest.approx(16 * of_layer_ms + 8 * again_ms)
    faster = replace(plain, device=replace(A800, core_factor=0.5)).coefficients(scheme)
    assert faster.host_ms == pytest.approx(16 * (of_layer_ms + launch_ms) / 2)
    assert faster.c_ms == plain.coefficients(scheme).c_ms
    assert model(LLAMA_7B, constants=device_constants("cpu")).coefficients(scheme).host_ms == 0.0


def test_the_host_issues_the_kernels_of_a_ranks_own_experts() -> None:
    scheme, experts = Scheme(tp=2, cp=8, ep=16), QWEN3_30B_A3B
    local = model(experts).coefficients(scheme).host_ms
    grouped = replace(model(experts), has_te_layers=True, groups_experts=True)
    num_more = 128 // 8 - 128 // 16
    for cost_model, layers in ((model(experts), LOCAL_LAYERS), (grouped, TE_LAYERS)):
        few, many = (
            cost_model.coefficients(replace(scheme, ep=ep)).host_ms / experts.num_layers
            for ep in (16, 8)
        )
        assert many - few == pytest.approx(1e3 * num_more * layers.expert.seconds(1.0))
    assert grouped.coefficients(scheme).host_ms < local


def test_the_share_of_the_forward() -> None:
    plain, again = (
        replace(model(LLAMA_7B), recompute=recompute).coefficients(Scheme(tp=2, pp=2))
        for recompute in (Recompute(), EVERY_LAYER)
    )
    # A third of matrix products, half of messages, less of attention; a quarter if run twice.
    assert plain.forward_share == pytest.approx(1 / 3, abs=0.02)
    assert again.forward_share == pytest.approx(1 / 4, abs=0.02)


def test_recompute_that_is_not_defined() -> None:
    for wrong, message in (
        ({"granularity": "full"}, "method and a number of layers"),
        ({"granularity": "full", "method": "block"}, "None and 0|block and 0"),
        ({"granularity": "selective"}, "names none"),
        ({"granularity": "selective", "modules": ("moe",)}, "names moe"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Recompute(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [device.name for device in DEVICES])
def test_every_device_gives_usable_coefficients(device: str) -> None:
    coefficients = model(LLAMA_7B, constants=device_constants(device)).coefficients(
        Scheme(tp=2, cp=2, pp=2)
    )
    assert min(coefficients.a_ms_per_token2, coefficients.b_ms_per_token, coefficients.c_ms) > 0.0


def test_a_node_has_no_more_ranks_than_it_has_gpus() -> None:
    device = device_constants("gb200")
    assert device.cluster(144, 4).linked_ranks == 72
    with pytest.raises(ConfigurationError, match="4 GPUs but 8 ranks; give --ranks-per-node 4"):
        device.cluster(144, 8)


def test_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=f"device 'tpu'.*use one of {DEVICE_NAMES},"):
        device_constants("tpu")


@pytest.mark.parametrize("name", ["a100-80g", "A100-80GB", "a100-80"])
def test_the_unit_of_a_device_name_may_be_left_out(name: str) -> None:
    assert device_constants(name).name == "a100-80g"


def test_schemes_that_the_model_cannot_fill() -> None:
    with pytest.raises(StrategyError, match="33 stages"):
        model(LLAMA_7B).coefficients(Scheme(pp=33))


def test_time_of_a_micro_batch() -> None:
    coefficients = Coefficients(a_ms_per_token2=0.5, b_ms_per_token=2.0, c_ms=7.0)
    assert coefficients.time_ms([3, 1]) == 0.5 * 10 + 2.0 * 4 + 7.0
    assert coefficients.time_ms([]) == 7.0
    assert coefficients.sequence_time_ms(3) == 0.5 * 9 + 6.0


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_impossible_coefficients(bad: float) -> None:
    with pytest.raises(ConfigurationError, match="at least 0 and below"):
        Coefficients(0.0, bad, 1.0)


def test_impossible_constants() -> None:
    with pytest.raises(ConfigurationError, match="fractions in"):
        replace(A800, matmul_fraction=1.5)
    with pytest.raises(ConfigurationError, match=r"precision 'fp16' is none of 2.*bf16, fp32"):
        Precision.of("fp16")


def test_a_window_shortens_long_sequences_only() -> None:
    windowed = replace(LLAMA_32B, num_windowed_layers=30, window_tokens=1000)
    full, half = (model(shape).coefficients(Scheme(tp=8)) for shape in (LLAMA_32B, windowed))
    assert half.time_ms((1000, 500)) == full.time_ms((1000, 500))
    # Of 4000² tokens² a windowed layer computes 4000² - 3000².
    attention = full.time_ms((4000,)) - full.b_ms_per_token * 4000 - full.c_ms
    saved = full.time_ms((4000,)) - half.time_ms((4000,))
    assert saved == pytest.approx(attention * (9 / 16) / 2)


def test_fp32_has_the_rate_without_tensor_cores() -> None:
    """19.5 of 312 TFLOP/s: NVIDIA's data sheet, where torch does not allow TF32."""
    in_bf16, in_fp32 = (
        AnalyticCostModel(
            shape=LLAMA_7B, device=A800, cluster=A800.cluster(8, 8), precision=precision
        )
        for precision in Precision
    )
    ratios = [
        getattr(in_fp32.forward_terms(Scheme())[cause], power)
        / getattr(in_bf16.forward_terms(Scheme())[cause], power)
        for cause, power in (("matmul", "per_token_s"), ("attention", "per_token2_s"))
    ]
    assert ratios == pytest.approx([16.0, 16.0], rel=0.05)
    assert in_fp32.peak_flops_per_s == 19.5e12
