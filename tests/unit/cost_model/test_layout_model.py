"""The layout model against hand calculation."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.hydraulis.cost_model.analytic import KERNELS
from megatron.hydraulis.cost_model.device import Precision, device_constants
from megatron.hydraulis.cost_model.layouts import (
    CAUSES,
    PURPOSES,
    predict_layout,
)
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from tests.support.fixed_length import A100, job, layout, llama, predict
from tests.unit.test_model_shape import DEEPSEEK_V3, QWEN3_30B_A3B


def test_mfu_counts_only_the_models_flops() -> None:
    of = job()
    prediction = predict(of, layout(recomputes_layers=True))
    num_entries = 40 * (4 * 5120**2 + 3 * 5120 * 13824) + 2 * 128_000 * 5120
    flops = 2048 * 2048 * (6 * num_entries + 12 * 40 * 5120 * 2048)
    assert of.model_flops == pytest.approx(flops)
    assert prediction.mfu == pytest.approx(flops / (prediction.step_s * 64 * 312e12))


def test_the_parts_are_the_step() -> None:
    prediction = predict(job(), layout(2, 2, 2, recomputes_layers=True))
    parts = prediction.time
    assert tuple(parts) == tuple(CAUSES)
    of_experts = {name for name in parts if name.startswith("expert")}
    assert {name for name, part in parts.items() if part <= 0.0} == of_experts
    assert sum(parts.values()) == pytest.approx(prediction.step_s)


def test_matrix_products_and_messages_by_hand() -> None:
    time = predict(job(), layout(1, 2, 1)).time
    num_micro_batches, num_tokens = 2048 // 32, 2048
    kernels, rates = A100.kernels, A100.rates(Precision.BF16)
    assert kernels is not None
    matrices = ((5120, 3 * 2560), (2560, 5120), (5120, 13824), (6912, 5120))
    layer_s = 3 * sum(kernels.product_s(rates, num_tokens, n, k) for k, n in matrices)
    layer_s /= KERNELS.product_share
    # Linear in tokens, the model deviates from whole waves of tiles.
    assert time["matmul_s"] == pytest.approx(num_micro_batches * 40 * layer_s, rel=0.05)
    # Four all-reduces of a hidden state in bf16, forward and backward, as two collectives each.
    collective_s = kernels.collective_s(rates, "all_gather", 2, num_tokens * 5120 * 2)
    collectives_s = num_micro_batches * 40 * 8 * collective_s
    assert time["tensor_parallel_s"] == pytest.approx(collectives_s, rel=0.1)
    assert time["boundary_s"] == 0.0
    assert max(time["bubble_s"], time["imbalance_s"]) == pytest.approx(0.0, abs=1e-9)


def test_equal_stages_take_m_plus_pp_minus_1() -> None:
    """With a negligible output layer this is 1F1B's closed form."""
    of = job("30B", 64)
    of = replace(of, shape=replace(of.shape, vocab_size=1))
    prediction = predict(of, layout(1, 1, 4))
    time = prediction.time
    num_micro_batches = 2048 // 16
    on_a_stage = prediction.step_s - time["data_parallel_s"]
    one_s = (on_a_stage - time["bubble_s"]) / num_micro_batches
    assert on_a_stage == pytest.approx((num_micro_batches + 3) * one_s, rel=1e-4)


def test_state_by_hand() -> None:
    prediction = predict(job("30B", 256), layout(1, 2, 4))
    shape, memory = llama("30B"), prediction.memory
    assert prediction.stage == 0
    norms = 15 * 2 * 6656  # on both ranks
    parameters = norms + (15 * shape.num_parameters_per_layer - norms + 128_000 * 6656) / 2
    # Weights in bf16 and gradients in fp32.
    assert memory["weights_bytes"] == pytest.approx(6 * parameters)
    assert tuple(memory) == tuple(PURPOSES)
    assert min(memory.values()) > 0.0
    assert prediction.memory_bytes == pytest.approx(sum(memory.values()))


def test_faster_devices_are_faster_and_smaller_ones_hold_less() -> None:
    of, how = job("30B", 64), layout(1, 2, 4)
    times = {
        name: predict_layout(of, how, device_constants(name)).step_s
        for name in ("a100-80g", "a100-40g", "a800-80g", "h100", "h200")
    }
    assert times["h200"] < times["h100"] < times["a100-80g"] < times["a800-80g"]
    assert times["a100-80g"] < times["a100-40g"]
    assert not predict_layout(of, how, device_constants("a100-40g")).fits
    assert predict_layout(of, how, device_constants("h200")).fits


def test_slower_network_costs_more() -> None:
    of, how = job("30B", 256), layout(1, 1, 4)
    slow = replace(A100, inter_node=replace(A100.inter_node, bytes_per_s=5e9))
    before, after = predict(of, how), predict_layout(of, how, slow)
    time, slower = before.time, after.time
    # Five times the messages, of which compute hides as much as before.
    assert 2 * time["data_parallel_s"] < slower["data_parallel_s"] < 8 * time["data_parallel_s"]
    assert after.step_s > before.step_s


def test_gathers_of_fp32_parameters_move_twice_the_bytes() -> None:
    """With gradients in fp32 both times: 4 + 4 bytes of a parameter instead of 2 + 4."""
    of, how = job("13B", 64), layout(1, 2, 1)
    in_fp32 = replace(of, layers={"precision": Precision.FP32})
    times_s = [predict(each, how).time["data_parallel_s"] for each in (of, in_fp32)]
    assert 1.2 * times_s[0] < times_s[1] < 2.0 * times_s[0]


def test_uneven_stages_take_the_time_of_the_longest() -> None:
    of = job("30B", 128)
    assert predict(of, layout(1, 1, 8)).time["imbalance_s"] > 0.0
    assert predict(of, layout(1, 1, 8)).step_s > 0.0
    with pytest.raises(StrategyError, match="64 stages"):
        predict(of, layout(1, 1, 64))


EXPERTS = replace(job(), shape=QWEN3_30B_A3B)
WITH_EXPERTS = layout(2, 2, 2, ep=8, sequence_parallel=True)


def test_experts_over_replicas_cost_what_the_cost_model_says() -> None:
    """Half of the experts of a rank: their weights and optimizer, and more messages."""
    less, more = (predict(EXPERTS, replace(WITH_EXPERTS, ep=ep)) for ep in (8, 16))
    num_routed = 24 * QWEN3_30B_A3B.num_routed_entries
    # Weights in bf16 and gradients in fp32; the optimizer is spread over all ranks.
    saved = less.memory["weights_bytes"] - more.memory["weights_bytes"]
    assert saved == pytest.approx(6 * num_routed * (1 / 8 - 1 / 16))
    # 15 of 16 copies travel, not 7 of 8, and some of them between nodes.
    assert more.time["expert_parallel_s"] > less.time["expert_parallel_s"] * (15 / 16) / (7 / 8)
    assert more.time["launch_s"] < less.time["launch_s"]
    grouped = predict(
        replace(EXPERTS, layers={"has_te_layers": True, "groups_experts": True}), WITH_EXPERTS
    )
    assert 0.0 < grouped.time["launch_s"] < less.time["launch_s"] / 2
    assert grouped.time["matmul_s"] < less.time["matmul_s"]
    # Four replicas share experts: columns of a replica of 16 ranks.
    assert str(WITH_EXPERTS.strategy(EXPERTS)) == "4*tp2cp4~ep8pp2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "replicas of 3 ranks together, which must use all ranks, but the job has 64"),
        ({"tp": 8, "pp": 16}, "replicas of 128 ranks"),
        ({"ep": 2}, "model has no experts; drop the ep"),
    ],
)
def test_layouts_that_leave_ranks_over(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        predict(job(), replace(layout(), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 6}, "ep above tp·cp is tp times a power of two"),
        ({"ep": 64}, "in replicas of 128 ranks together.*the job has 64"),
        ({"pp": 1, "ep": 64, "shape": DEEPSEEK_V3}, None),
        ({"tp": 1, "pp": 1, "ep": 16, "num_experts": 24}, "an ep that divides 24"),
    ],
)
def test_layouts_that_cannot_distribute_experts(
    changes: dict[str, Any], message: str | None
) -> None:
    changes = dict(changes)
    shape = changes.pop("shape", QWEN3_30B_A3B)
    if "num_experts" in changes:
        shape = replace(shape, num_experts=changes.pop("num_experts"))
    of, how = replace(EXPERTS, shape=shape), replace(WITH_EXPERTS, **changes)
    if message is None:
        assert predict(of, how).time["expert_parallel_s"] > 0.0
    else:
        with pytest.raises(ConfigurationError, match=message):
            predict(of, how)
