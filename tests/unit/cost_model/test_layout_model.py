"""The layout model against hand calculation, and against facts about measured layouts."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.layouts import (
    FixedLengthJob,
    Layout,
    LayoutPrediction,
    StepTime,
    predict_layout,
    step_time,
)
from megatron.hydraulis.cost_model.software import TRAINING, OtherTraining, software_of
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from tests.support.fixed_length import A100, KERNELS, NORM_KERNEL, job, layout, llama, predict
from tests.unit.test_model_shape import DEEPSEEK_V3, QWEN3_30B_A3B

OTHERS = KERNELS[1:]


def other(kernel: str = NORM_KERNEL) -> OtherTraining:
    found = software_of(kernel).other
    assert found is not None
    return found


SWEEPS = [
    ("13B", 64, 2048, (1, 2), (1, 2)),
    ("13B", 128, 8192, (1, 2, 4), (1, 2, 4)),
    ("30B", 64, 2048, (1, 2, 4), (1, 2, 4)),
    ("30B", 256, 2048, (1, 2, 4), (1, 2, 4)),
    ("30B", 128, 8192, (2, 4), (1, 2, 4, 8)),
    ("65B", 128, 2048, (2, 4, 8), (1, 2, 4, 8)),
]


def sweep(
    name: str,
    num_ranks: int,
    sequence_tokens: int,
    tps: tuple[int, ...],
    pps: tuple[int, ...],
    *,
    sequence_parallel: bool = False,
) -> dict[tuple[int, int, int], LayoutPrediction]:
    """Layouts that fit, by micro-batch size, tp and pp."""
    of = job(name, num_ranks, sequence_tokens)
    predictions = {}
    for size, tp, pp in itertools.product((1, 2, 4), tps, pps):
        if of.num_sequences % (size * (num_ranks // (tp * pp))) == 0:
            how = layout(size, tp, pp, sequence_parallel=sequence_parallel)
            predictions[size, tp, pp] = predict(of, how)
    return {key: prediction for key, prediction in predictions.items() if prediction.fits}


def test_mfu_counts_only_the_models_flops() -> None:
    of = job()
    prediction = predict(of, layout(recomputes_layers=True))
    num_entries = 40 * (4 * 5120**2 + 3 * 5120 * 13824) + 2 * 128_000 * 5120
    flops = 2048 * 2048 * (6 * num_entries + 12 * 40 * 5120 * 2048)
    assert of.model_flops == pytest.approx(flops)
    assert prediction.mfu == pytest.approx(flops / (prediction.time.total_s * 64 * 312e12))


def test_the_parts_are_the_step() -> None:
    time = predict(job(), layout(2, 2, 2, kernel="fused", recomputes_layers=True)).time
    parts = {field.name: getattr(time, field.name) for field in fields(StepTime)}
    of_experts = {name for name in parts if name.startswith("expert")}
    assert {name for name, part in parts.items() if part <= 0.0} == of_experts
    assert sum(parts.values()) == pytest.approx(time.total_s)


def test_matrix_products_and_messages_by_hand() -> None:
    time = predict(job(), layout(1, 2, 1)).time
    num_micro_batches, num_tokens = 2048 // 32, 2048
    entries = 4 * 5120**2 + 3 * 5120 * 13824
    rate = 312e12 * A100.matmul_fraction
    software = software_of(NORM_KERNEL)
    layer_s = 3 * 2 * num_tokens * entries / 2 / rate
    assert time.matmul_s == pytest.approx(num_micro_batches * 40 * layer_s)
    # Four all-reduces of a hidden state in bf16: over two ranks each sends as much as it has.
    all_reduce_s = 2 * software.collective_latencies * 5e-6 + num_tokens * 5120 * 2 / (
        300e9 * A100.link_fraction * software.tp_link_share
    )
    assert time.tensor_parallel_s == pytest.approx(num_micro_batches * 40 * 4 * all_reduce_s)
    assert time.boundary_s == time.wait_s == 0.0
    assert max(time.bubble_s, time.imbalance_s) == pytest.approx(0.0, abs=1e-9)


def test_equal_stages_take_m_plus_pp_minus_1() -> None:
    """Without waits and with a negligible output layer this is 1F1B's closed form."""
    of = job("30B", 64)
    of = replace(of, shape=replace(of.shape, vocab_size=1))
    without_waits = replace(
        software_of(NORM_KERNEL), other=replace(other(), wait_micro_batches=0.0)
    )
    time = step_time(of, layout(1, 1, 4), A100, without_waits)
    num_micro_batches = 2048 // 16
    on_a_stage = time.total_s - time.data_parallel_s
    one_s = (on_a_stage - time.bubble_s) / num_micro_batches
    assert on_a_stage == pytest.approx((num_micro_batches + 3) * one_s, rel=1e-4)


def test_waits_end_where_stages_work_one_at_a_time() -> None:
    """A single micro-batch: no waits beyond filling and draining."""
    of = replace(job(), num_sequences=32)
    assert predict(of, layout(1, 1, 2, kernel="flash_attention2")).time.wait_s == 0.0
    two = replace(of, num_sequences=64)
    time = predict(two, layout(1, 1, 2, kernel="flash_attention2")).time
    busy = time.total_s - time.data_parallel_s - time.wait_s
    assert time.wait_s < busy / 2


def test_memory_by_hand() -> None:
    memory = predict(job("30B", 256), layout(1, 2, 4)).memory
    shape = llama("30B")
    assert memory.stage == 0
    norms = 15 * 2 * 6656  # on both ranks
    parameters = norms + (15 * shape.num_parameters_per_layer - norms + 128_000 * 6656) / 2
    assert memory.weights_bytes == pytest.approx(4 * parameters)
    assert memory.optimizer_bytes == pytest.approx(12 * parameters / 32)
    # Per token: 6 hidden states, and over two ranks 6 as wide as the queries and 4 as the MLP.
    layer = 2 * 6656 * 6 + (6 * 6656 + 4 * 17920)
    kept = 15 * 4 * 2048 * layer
    assert memory.activations_bytes == pytest.approx(kept, rel=0.01)
    parts = (
        memory.weights_bytes,
        memory.optimizer_bytes,
        memory.activations_bytes,
        memory.working_bytes,
        memory.reserve_bytes,
    )
    assert memory.total_bytes == pytest.approx(sum(parts))


def test_13b_on_one_gpu_a_replica_needs_the_norm_kernel() -> None:
    """Measured (arXiv 2311.05610): it fits with that kernel and runs out of memory without."""
    fits = {kernel: predict(job(), layout(kernel=kernel)).fits for kernel in OTHERS}
    assert fits == {kernel: kernel == NORM_KERNEL for kernel in OTHERS}


def test_whole_logits_do_not_get_smaller_with_tp() -> None:
    """No layout of 32,768 tokens a micro-batch ran in 139 (arXiv 2311.05610)."""
    shape = llama("13B")
    working = {tp: predict(job(), layout(16, tp)).memory.working_bytes for tp in (1, 2, 4, 8)}
    assert min(working.values()) > 16 * shape.vocab_size * 2048 * 16
    assert not any(predict(job(), layout(16, tp, sequence_parallel=True)).fits for tp in (2, 4, 8))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("which", SWEEPS, ids=str)
def test_micro_batches_of_one_sequence_win_every_sweep(
    which: tuple[str, int, int, tuple[int, ...], tuple[int, ...]], sequence_parallel: bool
) -> None:
    found = sweep(*which, sequence_parallel=sequence_parallel)
    best = min(found, key=lambda key: found[key].time.total_s)
    assert best[0] == 1


@pytest.mark.parametrize("which", SWEEPS, ids=str)
def test_best_layouts_reach_a_plausible_mfu(
    which: tuple[str, int, int, tuple[int, ...], tuple[int, ...]],
) -> None:
    """Published runs of dense models on A100 reach half to seven tenths of the peak."""
    found = sweep(*which, sequence_parallel=True)
    assert 0.5 <= max(prediction.mfu for prediction in found.values()) <= 0.72


@pytest.mark.parametrize("tp", [2, 4])
def test_at_equal_tp_two_sequences_are_a_little_faster(tp: int) -> None:
    one, two = (predict(job(), layout(size, tp)).time.total_s for size in (1, 2))
    assert 0.9 * one < two < one


def test_pipelines_beat_tensor_parallelism_at_equal_product() -> None:
    """Measured: in 52 of 54 pairs."""
    num_pairs = num_won = 0
    for which, sequence_parallel in itertools.product(SWEEPS, (False, True)):
        found = sweep(*which, sequence_parallel=sequence_parallel)
        for first, second in itertools.permutations(found, 2):
            same_ranks = first[1] * first[2] == second[1] * second[2]
            if first[0] == second[0] and same_ranks and first[2] > second[2]:
                num_pairs += 1
                num_won += found[first].time.total_s < found[second].time.total_s
    assert num_pairs >= 45
    assert num_won >= 0.92 * num_pairs


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pipelines_beat_tensor_parallelism_with_long_sequences_too(sequence_parallel: bool) -> None:
    """Waits of pipelines do not grow with the length."""
    found = sweep(*SWEEPS[1], sequence_parallel=sequence_parallel)
    for size in (1, 2):
        for first, second in itertools.permutations((1, 2, 4), 2):
            pair = (size, first, 4 // first), (size, second, 4 // second)
            if first < second and all(each in found for each in pair):
                assert found[pair[0]].time.total_s < found[pair[1]].time.total_s


@pytest.mark.parametrize("num_tokens", [1024, 2048, 8192])
def test_pipelines_wait_for_micro_batches_of_short_sequences(num_tokens: int) -> None:
    of = job("13B", 64, num_tokens)
    parts = predict(of, layout(1, 1, 2)).time
    slowest_s = parts.wait_s / other().wait_micro_batches
    slowest_s *= max(1.0, num_tokens / other().wait_tokens)
    num_micro_batches = of.num_sequences // 32
    two_stages_s = parts.total_s - parts.data_parallel_s - parts.wait_s
    # m · max t + the other stage's t, which has no logits.
    assert num_micro_batches * slowest_s < two_stages_s < (num_micro_batches + 1) * slowest_s


@pytest.mark.parametrize("kernel", OTHERS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_recomputation_costs_a_quarter_to_a_half(kernel: str, tp: int, pp: int) -> None:
    """Measured: 1.24 to 1.43 times as long."""
    without = predict(job(), layout(1, tp, pp, kernel=kernel))
    with_it = predict(job(), layout(1, tp, pp, kernel=kernel, recomputes_layers=True))
    assert 1.2 <= with_it.time.total_s / without.time.total_s <= 1.43
    assert with_it.memory.total_bytes < without.memory.total_bytes


def test_four_times_the_gpus_cost_a_30b_model_a_tenth_or_more() -> None:
    """Measured: 9 to 29 % for data parallelism at 256 GPUs."""
    few, many = (sweep("30B", num, 2048, (1, 2, 4), (1, 2, 4)) for num in (64, 256))
    costs = [4 * many[key].time.total_s / few[key].time.total_s - 1 for key in few if key in many]
    assert len(costs) >= 8
    assert min(costs) >= 0.05
    assert 0.15 <= max(costs) <= 0.29


def test_published_headline() -> None:
    """70.5 % MFU for 13B at 2k tokens, the abstract of arXiv 2311.05610."""
    best = min(sweep(*SWEEPS[0]).values(), key=lambda prediction: prediction.time.total_s)
    assert best.layout == layout(1, 1, 1)
    assert best.mfu == pytest.approx(0.705, rel=0.1)


def test_faster_devices_are_faster_and_smaller_ones_hold_less() -> None:
    of, how = job("30B", 64), layout(1, 2, 4)
    times = {
        name: predict_layout(of, how, device_constants(name)).time.total_s
        for name in ("a100-80g", "a100-40g", "a800-80g", "h100", "h200")
    }
    assert times["h200"] < times["h100"] < times["a100-80g"] < times["a800-80g"]
    assert times["a100-80g"] < times["a100-40g"]
    assert not predict_layout(of, how, device_constants("a100-40g")).fits
    assert predict_layout(of, how, device_constants("h200")).fits


def test_slower_network_costs_more() -> None:
    of, how = job("30B", 256), layout(1, 1, 4)
    slow = replace(A100, inter_node=replace(A100.inter_node, bytes_per_s=5e9))
    time, slower = predict(of, how).time, predict_layout(of, how, slow).time
    assert slower.data_parallel_s == pytest.approx(5 * time.data_parallel_s)
    assert slower.total_s > time.total_s


def test_uneven_stages_take_the_time_of_the_longest() -> None:
    of = job("30B", 128)
    assert predict(of, layout(1, 1, 8)).time.imbalance_s > 0.0
    assert predict(of, layout(1, 1, 8)).time.total_s > 0.0
    with pytest.raises(StrategyError, match="64 stages"):
        predict(of, layout(1, 1, 64))


def test_unknown_kernels_are_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigurationError, match=r"'xformers'.*'torch', 'fused'.*RMS kernel'"):
        predict(job(), layout(kernel="xformers"))
    assert software_of("Flash_Attention2+RMS Kernel").name == NORM_KERNEL


EXPERTS = replace(job(), shape=QWEN3_30B_A3B)
WITH_EXPERTS = layout(2, 2, 2, ep=8, kernel=TRAINING.name, sequence_parallel=True)


def test_experts_over_replicas_cost_what_the_cost_model_says() -> None:
    """Half of the experts of a rank: their weights and optimizer, and more messages."""
    less, more = (predict(EXPERTS, replace(WITH_EXPERTS, ep=ep)) for ep in (8, 16))
    num_routed = 24 * QWEN3_30B_A3B.num_routed_entries
    # Weights in bf16 and gradients in fp32; the optimizer is spread over all ranks.
    saved = less.memory.weights_bytes - more.memory.weights_bytes
    assert saved == pytest.approx(6 * num_routed * (1 / 8 - 1 / 16))
    # 15 of 16 copies travel, not 7 of 8, and some of them between nodes.
    assert more.time.expert_parallel_s > less.time.expert_parallel_s * (15 / 16) / (7 / 8)
    assert more.time.launch_s < less.time.launch_s
    grouped = predict(
        replace(EXPERTS, layers={"has_te_layers": True, "groups_experts": True}), WITH_EXPERTS
    )
    assert 0.0 < grouped.time.launch_s < less.time.launch_s / 2
    assert grouped.time.matmul_s == less.time.matmul_s
    # Four replicas share experts: columns of a replica of 16 ranks.
    assert str(WITH_EXPERTS.strategy(EXPERTS)) == "4*tp2cp4~ep8pp2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "replicas of 3 ranks must use all ranks but the job has 64"),
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
        ({"sequence_parallel": False}, "routers need sequence parallelism where tp is above 1"),
        ({"kernel": "torch"}, "constants were measured without experts but the model has 128"),
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
        assert predict(of, how).time.expert_parallel_s > 0.0
    else:
        with pytest.raises(ConfigurationError, match=message):
            predict(of, how)


def test_impossible_sizes() -> None:
    with pytest.raises(ConfigurationError, match="tp is 0"):
        Layout(micro_batch_size=1, tp=0, pp=1, kernel=NORM_KERNEL)
    with pytest.raises(ConfigurationError, match="number of sequences a step is 0"):
        FixedLengthJob(shape=llama("13B"), num_ranks=8, sequence_tokens=1, num_sequences=0)
    with pytest.raises(ConfigurationError, match="attention_share 0"):
        replace(TRAINING, attention_share=0.0)
    with pytest.raises(ConfigurationError, match="ffn_passes is -1"):
        replace(TRAINING, ffn_passes=-1.0)
    with pytest.raises(ConfigurationError, match="logit_bytes is inf"):
        replace(
            TRAINING, other=replace(other(), kept=replace(other().kept, logit_bytes=float("inf")))
        )


def test_published_run_with_tp_8_of_another_model() -> None:
    """41.5 % MFU for 22B on 8 A100, tp 8, sequence parallelism, 4 sequences in one micro-batch:
    arXiv 2205.05198, table 5. Nothing was fitted to a tp above 2."""
    shape = ModelShape(
        num_layers=48,
        hidden_size=6144,
        ffn_hidden_size=4 * 6144,
        num_attention_heads=64,
        num_query_groups=64,
        kv_channels=96,
        vocab_size=51_200,
        gated_mlp=False,
        tied_embeddings=True,
    )
    of = FixedLengthJob(shape=shape, num_ranks=8, sequence_tokens=2048, num_sequences=4)
    prediction = predict(of, layout(4, 8, 1, kernel="fused", sequence_parallel=True))
    assert prediction.mfu == pytest.approx(0.415, rel=0.1)
