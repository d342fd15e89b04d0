"""Memory of real roles on the stand-in, compared with the memory model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron.hydraulis.cost_model.device import Precision, Reserve, device_constants
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.staging import PoolFootprint, num_communicators
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, Recompute
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings, ShardedAdamW
from megatron.hydraulis.runtime.attention import SegmentAttention
from megatron.hydraulis.runtime.core_attention import VarlenAttention
from megatron.hydraulis.runtime.memory import CudaMemory
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.transfer.canonical import Unit
from tests.cuda_stand_in import device
from tests.cuda_stand_in.counters import Case, peak_bytes
from tests.cuda_stand_in.lone_ranks import log_of, run_alone
from tests.cuda_stand_in.role_memory import Role, core_attention_of, measure, try_out
from tests.support.models import SmallModel

GIB = 2**30
DEVICE = device_constants("a100-80")
MOST_OVERESTIMATED = 0.03
"""Of the peak of a run."""
MOST_OVER_UPSTREAM = 1.02
OTHER_PHASES = 0.04
MOST_RETRIES = 8
"""Of the allocator in all iterations, which then unmaps what is free and goes on."""
COPY_LIMIT_BYTES = 2**20
"""Larger copies move nothing: the models would not fit this machine."""

TIMEOUT_S = 200.0
"""Of a rank: hundreds of experts are as many modules."""


def in_use_bytes(reserve: Reserve) -> int:
    """What is in use on the device besides torch's allocator and communicators."""
    return int(reserve.context_bytes + reserve.connection_bytes)


DEVICE_SETTINGS: dict[str, Any] = {
    "STAND_IN_MEMORY_BYTES": int(DEVICE.memory_bytes),
    "STAND_IN_IN_USE_BYTES": in_use_bytes(DEVICE.reserve()),
    "STAND_IN_COMMUNICATOR_BYTES": int(DEVICE.communicator_bytes),
    "STAND_IN_COPY_LIMIT_BYTES": COPY_LIMIT_BYTES,
}


def llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        vocab_size=vocab,
        gated_mlp=True,
        tied_embeddings=False,
    )


M7 = llama(32, 4096, 11008, 32, 32, 32000)
M8 = llama(32, 4096, 14336, 32, 8, 128256)
M32 = llama(60, 6656, 17920, 64, 64, 30592)
M70 = llama(80, 8192, 28672, 64, 8, 128256)
GATED = dataclasses.replace(M8, output_gate=True)
WINDOWED = dataclasses.replace(M8, num_windowed_layers=16, window_tokens=128)
LATENT = dataclasses.replace(
    M7,
    kv_channels=192,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)
"""With DeepSeek-V3's latents and heads."""
MIXTRAL = dataclasses.replace(
    M8,
    vocab_size=32000,
    num_experts=8,
    num_expert_layers=32,
    experts_per_token=2,
    expert_ffn_hidden_size=14336,
)
MANY_EXPERTS = dataclasses.replace(
    llama(12, 2048, 6144, 32, 4, 151936),
    kv_channels=128,
    num_experts=128,
    num_expert_layers=12,
    experts_per_token=8,
    expert_ffn_hidden_size=768,
)
"""Layers of Qwen3-30B-A3B."""
QWEN3_30B = dataclasses.replace(MANY_EXPERTS, num_layers=48, num_expert_layers=48)
SHARED_EXPERTS = dataclasses.replace(
    llama(9, 2048, 11264, 16, 16, 163840),
    num_experts=64,
    num_expert_layers=8,
    num_first_mlp_layers=1,
    experts_per_token=6,
    expert_ffn_hidden_size=1408,
    shared_expert_ffn_hidden_size=2816,
)
"""Layers of Moonlight, the first without experts."""
LATENT_EXPERTS = dataclasses.replace(
    SHARED_EXPERTS,
    kv_channels=192,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)
"""And with its attention."""
MOONLIGHT = dataclasses.replace(LATENT_EXPERTS, num_layers=27, num_expert_layers=26)
GPT_OSS = dataclasses.replace(
    llama(24, 2880, 2880, 64, 8, 201088),
    kv_channels=64,
    num_windowed_layers=12,
    window_tokens=128,
    num_experts=32,
    num_expert_layers=24,
    experts_per_token=4,
    expert_ffn_hidden_size=2880,
)
"""GPT-OSS of 20B parameters."""
PREDICTING, PREDICTING_TIED = (
    dataclasses.replace(M8, num_predictions=1, tied_embeddings=tied) for tied in (False, True)
)
CHUNKS = Recompute(granularity="full", method="uniform", num_layers=4)
BLOCK = Recompute(granularity="full", method="block", num_layers=30)
MLP = Recompute(granularity="selective", modules=("mlp",))
ATTENTION = Recompute(granularity="selective", modules=("core_attn",))
BOTH = Recompute(granularity="selective", modules=("core_attn", "mlp"))
MIXED = "tp16+2*tp8pp3"

FIRST_PARTS = Frozen(frozenset({0}), embedding=True)
SMALL_ADAPTERS, LARGE_ADAPTERS = (
    Frozen.around(Lora.resolve(rank, 32, (), M8), M8) for rank in (16, 256)
)
ALL_BUT_LAST = Frozen(frozenset(range(31)), embedding=True, output=True)

# The kernel is torch's varlen_attn, or sdpa for fp32, which the former does not support.
FEW = (
    Role(shape=M32, strategy=MIXED, rank=16),
    Role(shape=M8, strategy="4*tp4cp4", cp_comm_type="a2a"),
    Role(shape=M7, strategy="4*tp1cp8pp2", recompute=EVERY_LAYER),
    Role(shape=M70, strategy="2*tp8pp4", rank=24),
    Role(shape=GATED, strategy="32*tp2", qk_norms=True, has_wide_norms=True),
    Role(shape=LATENT, strategy="16*tp4", qk_norms=True),
    Role(shape=MIXTRAL, strategy="8*tp4pp2"),
    Role(shape=MANY_EXPERTS, strategy="4*tp2cp4ep8pp2"),
    Role(shape=M8, strategy="8*cp8fs"),
    Role(shape=SHARED_EXPERTS, strategy="4*tp2cp8fsep4", gradient_bytes=2),
    Role(shape=M8, strategy="2*tp4", num_ranks=8, frozen=FIRST_PARTS),
    Role(shape=M8, strategy="2*tp4", num_ranks=8, frozen=ALL_BUT_LAST),
    Role(shape=M8, strategy="2*tp4", num_ranks=8, frozen=SMALL_ADAPTERS),
    Role(shape=PREDICTING, strategy="8*tp4pp2", rank=4),
)
PREDICTIONS = (Role(shape=PREDICTING_TIED, strategy="16*tp2pp2", rank=2),)
"""A last stage of a model with multi-token prediction."""
ADAPTED = (
    Role(shape=M8, strategy="8*tp1", num_ranks=8, frozen=LARGE_ADAPTERS),
    Role(shape=M8, strategy="2*pp4", num_ranks=8, frozen=LARGE_ADAPTERS),
    Role(shape=M8, strategy="tp8", num_ranks=8, frozen=SMALL_ADAPTERS),
    Role(shape=M8, strategy="cp8", num_ranks=8, frozen=LARGE_ADAPTERS, recompute=EVERY_LAYER),
    Role(shape=M8, strategy="tp8", num_ranks=8, frozen=SMALL_ADAPTERS, recompute=EVERY_LAYER),
    *(
        Role(
            shape=M8,
            strategy="2*pp4",
            num_ranks=8,
            frozen=Frozen.around(Lora.resolve(256, 32, target, M8), M8),
        )
        for target in ("linear_fc1", "linear_proj", "linear_fc2")
    ),
)
"""Adapters alone are trained."""
FROZEN = tuple(
    Role(shape=M8, num_ranks=8, frozen=frozen, **named)
    for frozen in (FIRST_PARTS, ALL_BUT_LAST)
    for named in (
        {"strategy": "8*tp1"},
        {"strategy": "tp4pp2"},
        {"strategy": "tp4pp2", "rank": 4},
        {"strategy": "tp2cp4", "recompute": EVERY_LAYER},
        {"strategy": "cp8fs"},
    )
    if frozen is FIRST_PARTS or named not in ({"strategy": "tp4pp2"}, {"strategy": "cp8fs"})
)
"""What a model provider freezes. A stage without any backward counts as if it had one, and cp8fs
with one trained layer is predicted 5 % too large."""
TIED = dataclasses.replace(M8, tied_embeddings=True)
SHARED = (
    Role(shape=M8, strategy="cp8~fs", num_ranks=8, context_size=1),
    Role(shape=M8, strategy="8*cp8fs", gradient_bytes=2),
    Role(shape=M8, strategy="8*cp8~fs", context_size=2, recompute=EVERY_LAYER),
    Role(shape=M8, strategy="cp64~fs", context_size=1),
    Role(shape=M8, strategy="cp64~fs", context_size=64),
    Role(shape=M8, strategy="8*tp2cp4~fs", context_size=2, recompute=ATTENTION),
    Role(shape=M8, strategy="16*tp2cp2fs", cp_comm_type="a2a", qk_norms=True),
    Role(shape=TIED, strategy="8*tp2cp4fs"),
    Role(shape=TIED, strategy="8*cp8fs", gradient_bytes=2),
    Role(shape=M32, strategy="cp64~fs", context_size=4, recompute=EVERY_LAYER),
    Role(shape=M32, strategy="4*tp4cp4~fs", context_size=1),
    Role(shape=M70, strategy="tp8cp8fs", recompute=EVERY_LAYER),
    Role(shape=M7, strategy="8*tp2cp4~fs", context_size=1, precision=Precision.FP32),
    Role(shape=LATENT, strategy="4*tp4cp4fs", qk_norms=True),
    Role(shape=MIXTRAL, strategy="2*tp4cp8~fs", context_size=1),
    Role(shape=MANY_EXPERTS, strategy="8*tp2cp4fs"),
    Role(shape=MANY_EXPERTS, strategy="8*tp2cp4fsep4"),
    Role(shape=MANY_EXPERTS, strategy="8*cp8fsep8", recompute=EVERY_LAYER),
    Role(shape=MANY_EXPERTS, strategy="cp64~fsep16", context_size=1),
)
"""Their cp ranks share weights."""
MORE = (
    *PREDICTIONS,
    *SHARED,
    *ADAPTED,
    *FROZEN,
    Role(shape=M32, strategy=MIXED, rank=0),
    Role(shape=M32, strategy=MIXED, rank=24),
    Role(shape=M32, strategy=MIXED, rank=32),
    Role(shape=M32, strategy="8*tp8"),
    Role(shape=M32, strategy="16*tp4"),
    Role(shape=M32, strategy="2*tp8cp4"),
    Role(shape=M32, strategy="2*tp8cp4", cp_comm_type="a2a"),
    Role(shape=M32, strategy="8*tp8", recompute=EVERY_LAYER),
    Role(shape=M32, strategy="8*tp8", recompute=CHUNKS),
    Role(shape=M32, strategy="8*tp8", recompute=BLOCK),
    Role(shape=M32, strategy="8*tp8", recompute=MLP),
    Role(shape=M32, strategy="8*tp8", recompute=ATTENTION),
    Role(shape=M32, strategy="8*tp8", recompute=BOTH),
    Role(shape=M32, strategy="tp4pp4", num_ranks=16, rank=15),
    Role(shape=M8, strategy="64*tp1"),
    Role(shape=M8, strategy="32*tp2"),
    Role(shape=M8, strategy="4*tp4cp4"),
    Role(shape=M8, strategy="8*tp1cp8"),
    Role(shape=M8, strategy="8*tp1cp8~", context_size=2),
    Role(shape=M8, strategy="8*tp1cp8~", context_size=8),
    Role(shape=M8, strategy="16*tp1pp4", rank=0),
    Role(shape=M8, strategy="16*tp1pp4", rank=3),
    Role(shape=M8, strategy="4*tp1cp8pp2"),
    Role(shape=M8, strategy="32*tp2", recompute=ATTENTION),
    Role(shape=M8, strategy="32*tp2", recompute=EVERY_LAYER),
    Role(shape=dataclasses.replace(M8, tied_embeddings=True), strategy="32*tp2"),
    Role(shape=M70, strategy="2*tp8pp4", rank=0),
    Role(shape=M70, strategy="2*tp8pp4", rank=8),
    Role(shape=M7, strategy="4*tp1cp8pp2"),
    Role(shape=M8, strategy="32*tp2", qk_norms=True),
    Role(shape=M8, strategy="32*tp2", qk_norms=True, recompute=ATTENTION),
    Role(shape=M7, strategy="16*tp4", qk_norms=True),
    Role(shape=M8, strategy="4*tp4cp4", qk_norms=True),
    Role(shape=M32, strategy="8*tp8", qk_norms=True),
    Role(shape=M7, strategy="16*tp4", sequence_parallel=False),
    Role(shape=M32, strategy="8*tp8", gradient_bytes=2),
    Role(shape=M32, strategy="16*tp4", gradient_bytes=2),
    Role(shape=M8, strategy="64*tp1", gradient_bytes=2),
    Role(shape=M7, strategy="16*tp4", precision=Precision.FP32),
    Role(shape=M7, strategy="16*tp2pp2", precision=Precision.FP32),
    Role(shape=dataclasses.replace(M7, gated_mlp=False), strategy="16*tp4"),
    Role(shape=dataclasses.replace(M7, gated_mlp=False), strategy="32*tp1pp2"),
    Role(shape=GATED, strategy="4*tp4cp4"),
    Role(shape=GATED, strategy="32*tp2", recompute=ATTENTION),
    Role(shape=GATED, strategy="32*tp2", recompute=EVERY_LAYER),
    Role(shape=M8, strategy="32*tp2", softmax_type="off-by-one"),
    Role(shape=M8, strategy="4*tp4cp4", softmax_type="learnable"),
    Role(shape=LATENT, strategy="4*tp2cp4pp2", qk_norms=True),
    Role(shape=LATENT, strategy="64*tp1"),
    Role(shape=LATENT, strategy="4*tp4cp4", cp_comm_type="a2a"),
    Role(shape=LATENT, strategy="16*tp4", qk_norms=True, recompute=ATTENTION),
    Role(shape=dataclasses.replace(LATENT, q_lora_rank=0), strategy="16*tp4", recompute=CHUNKS),
    Role(shape=MIXTRAL, strategy="8*tp8"),
    Role(shape=MIXTRAL, strategy="8*tp4pp2", rank=4),
    Role(shape=MIXTRAL, strategy="2*tp8cp4", recompute=EVERY_LAYER),
    Role(shape=SHARED_EXPERTS, strategy="16*tp4"),
    Role(shape=SHARED_EXPERTS, strategy="16*tp4", has_wide_router=True),
    Role(shape=SHARED_EXPERTS, strategy="64*tp1", has_sigmoid_router=True),
    Role(shape=MANY_EXPERTS, strategy="16*tp4", has_sigmoid_router=True),
    Role(shape=MANY_EXPERTS, strategy="8*tp4cp2", cp_comm_type="a2a"),
    Role(shape=MANY_EXPERTS, strategy="8*tp2cp4ep8"),
    Role(shape=MANY_EXPERTS, strategy="16*tp4", has_router_losses=True),
    Role(shape=MIXTRAL, strategy="8*tp8ep8"),
    Role(shape=MIXTRAL, strategy="8*tp1cp8ep8"),
    Role(shape=QWEN3_30B, strategy="8*tp2cp4ep8", recompute=EVERY_LAYER),
    Role(shape=MANY_EXPERTS, strategy="8*tp2cp4ep8", qk_norms=True, recompute=ATTENTION),
    Role(shape=MANY_EXPERTS, strategy="4*tp2cp4ep8pp2", rank=8),
    Role(shape=MANY_EXPERTS, strategy="4*tp2cp2ep4pp4", rank=4),
    Role(shape=MANY_EXPERTS, strategy="4*tp1cp8ep8pp2"),
    Role(shape=SHARED_EXPERTS, strategy="8*tp4pp2"),
    Role(shape=SHARED_EXPERTS, strategy="4*tp2cp4ep8pp2"),
    Role(shape=SHARED_EXPERTS, strategy="8*tp2cp4ep8", has_sigmoid_router=True),
    Role(shape=MOONLIGHT, strategy="8*tp8ep8", rank=63, qk_norms=True, recompute=EVERY_LAYER),
    Role(shape=LATENT, strategy="8*tp8"),
    Role(shape=LATENT_EXPERTS, strategy="16*tp4", qk_norms=True, has_sigmoid_router=True),
    Role(shape=WINDOWED, strategy="32*tp2"),
    Role(shape=WINDOWED, strategy="32*tp2", softmax_type="learnable", has_separate_gate=True),
    Role(shape=WINDOWED, strategy="4*tp4cp4"),
    *(
        Role(
            shape=GPT_OSS,
            strategy=strategy,
            softmax_type="learnable",
            has_separate_gate=True,
            has_biases=True,
        )
        for strategy in ("16*tp4", "16*tp2cp2ep4")
    ),
    Role(shape=M7, strategy="16*tp4", precision=Precision.FP32, has_wide_norms=True),
    Role(shape=M8, strategy="16*tp2pp2", has_wide_norms=True),
    Role(shape=M8, strategy="16*tp2pp2", rank=2, has_wide_norms=True),
    Role(shape=M7, strategy="16*tp4", has_wide_norms=True, recompute=EVERY_LAYER),
    Role(shape=M7, strategy="16*tp4", has_wide_norms=True, recompute=CHUNKS),
    Role(shape=M7, strategy="16*tp4", qk_norms=True, has_wide_norms=True, recompute=ATTENTION),
    Role(shape=M7, strategy="16*tp4", has_separate_gate=True, recompute=EVERY_LAYER),
    Role(shape=M8, strategy="32*tp2", has_separate_gate=True, recompute=MLP),
)


def model_of(role: Role) -> MemoryModel:
    return MemoryModel(
        shape=role.shape,
        device=DEVICE,
        num_ranks=role.num_ranks,
        precision=role.precision,
        sequence_parallel=role.sequence_parallel,
        recompute=role.recompute,
        cp_comm_type=role.cp_comm_type,
        qk_norms=role.qk_norms,
        num_gate_tensors=6 + role.has_biases if role.has_separate_gate else 0,
        softmax_type=role.softmax_type,
        has_wide_norms=role.has_wide_norms,
        router_bytes=4 if role.has_wide_router else 0,
        num_score_tensors=role.has_sigmoid_router + 3 * role.has_router_losses,
        has_te_layers=role.has_te,
        groups_experts=role.has_te and role.shape.num_experts > 0,
        fuses_rope=role.fuses_rope,
        has_te_attention=core_attention_of(role) == "te",
        ranks_per_node=role.ranks_per_node,
        pool=PoolFootprint.of(
            role.pool, role.shape, gradient_bytes=role.gradient_bytes, frozen=role.frozen
        ),
        frozen=role.frozen,
        expert_load=1.0,  # as lone ranks read
    )


def left_bytes(role: Role, scheme: Scheme, num_tokens: int) -> float:
    """The bytes that micro-batches leave on a rank until the next ones: the gather buffer of
    upstream's trained layers with sequence parallelism (frozen ones gather into a tensor of their
    own) and, after the first stage, the last hidden states received, with their gradient."""
    hidden_bytes = num_tokens / scheme.cp * role.shape.hidden_size * role.precision.num_bytes
    is_spread = role.sequence_parallel and scheme.tp > 1
    has_buffer = is_spread and not role.has_te and role.frozen.lora is None
    is_predicting = role.shape.num_predictions > 0 and role.stage == scheme.pp - 1
    buffer_bytes = hidden_bytes * (1 + is_predicting) if has_buffer else 0.0
    part_bytes = hidden_bytes / scheme.tp if is_spread else hidden_bytes
    return buffer_bytes + (2 * part_bytes if role.stage > 0 else 0.0)


def spared_bytes(role: Role) -> float:
    """How much less than the model counts a later stage may stage: what the first one stages of
    the embedding as a role, and about as much as an owner, in fp32."""
    return 2 * role.shape.num_embedding_parameters / role.scheme.tp * Precision.FP32.num_bytes


def check(role: Role, logs: Path | None = None) -> str:
    """The role at its planned limit, on a device without further memory; its line in memory.csv."""
    model = model_of(role)
    scheme = role.scheme.of_context_group(role.context_size or role.scheme.cp)
    num_tokens = model.max_tokens(scheme)
    assert num_tokens
    found = run_alone(
        measure,
        role,
        num_tokens,
        num_ranks=role.num_ranks,
        ranks=[role.rank],
        logs=logs,
        timeout_s=TIMEOUT_S,
        **DEVICE_SETTINGS | {"STAND_IN_IN_USE_BYTES": in_use_bytes(model.reserve)},
    )[0]
    predicted = model.peak_bytes(scheme, role.stage, num_tokens)
    between = model.state_bytes(scheme, role.stage) + left_bytes(role, scheme, num_tokens)
    row = (
        f"{role!s:<48} {num_tokens:>8,} {predicted / GIB:6.2f} {found.peak_bytes / GIB:6.2f} "
        f"{max(found.reserved.values()) / GIB:6.2f} {found.device_bytes / GIB:6.2f} "
        f"{between / GIB:6.2f} {found.allocated['gather'] / GIB:6.2f} "
        f"{found.allocated['scatter'] / GIB:6.2f} {found.allocated['optimizer'] / GIB:6.2f}"
    )
    # The model counts the staging of the rank that needs most.
    spared = spared_bytes(role) if role.stage > 0 else 0.0
    most = (1 + MOST_OVERESTIMATED) * found.peak_bytes + spared
    assert found.peak_bytes <= predicted <= most, row
    assert predicted <= model.usable_bytes, row
    for phase in ("gather", "scatter", "optimizer"):
        allocated = found.allocated[phase]
        least = (1 - OTHER_PHASES) * between - spared
        assert least <= allocated <= (1 + OTHER_PHASES) * between, (phase, row)
    assert found.device_bytes <= DEVICE.memory_bytes, row
    # The reserve is for what lies between tensors.
    assert found.num_retries <= MOST_RETRIES, row
    if found.num_retries:
        print(f"\nfreed {found.num_retries} times: {role}")
    return f"\n{role},{num_tokens},{predicted / GIB:.2f},{found.peak_bytes / GIB:.2f}"


@pytest.mark.parametrize("role", FEW, ids=str)
def test_a_run_at_its_limit_takes_what_is_predicted(role: Role, tmp_path: Path) -> None:
    print(check(role, logs=tmp_path))
    sizes = re.findall(r" COMM \d+ id \S+ size (\d+) ", log_of(tmp_path, role.rank).read_text())
    with_others = [size for size in sizes if size != "1"]
    assert len(with_others) == num_communicators(role.pool)


@pytest.mark.nightly
@pytest.mark.parametrize("role", MORE, ids=str)
def test_every_role_takes_what_is_predicted(role: Role) -> None:
    print(check(role))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_job_of_one_strategy_takes_little_more_than_upstream(tp: int) -> None:
    """So few tokens that nearly all is state: with more, the ratio is nearer to 1."""
    ours, plain = (
        run_alone(
            peak_bytes,
            Case(side, M8.num_layers, tp, lengths=(64,), same_attention=True, shape=M8),
            num_ranks=8,
            ranks=[0],
            timeout_s=TIMEOUT_S,
            **DEVICE_SETTINGS,
        )[0]
        for side in ("ours", "plain")
    )
    print(f"\n8B tp{tp}: {ours / 1e9:.2f} GB, upstream {plain / 1e9:.2f} GB")
    assert ours <= MOST_OVER_UPSTREAM * plain


def test_a_trial_takes_little_off_a_planned_limit() -> None:
    role = FEW[0]
    limit = model_of(role).max_tokens(role.scheme)
    (result,) = run_alone(
        try_out, role, limit, num_ranks=role.num_ranks, ranks=[role.rank], **DEVICE_SETTINGS
    )
    # Of the fragments that the reserve expects, a trial keeps some for packs of other lengths.
    assert 0.99 * limit <= result.allowed_tokens <= result.promised_tokens == limit
    # State and communicators exist before tokens are counted: the line is the model's.
    slope = max(
        moment.bytes_per_token for moment in model_of(role).moments(role.scheme, role.stage)
    )
    assert result.trial.bytes_per_token == pytest.approx(slope, rel=0.1)


def peaks_of_a_meter() -> tuple[int, int, int]:
    """Peaks by the meter, by torch's tensors, and in use on the device, with a hole between
    tensors."""
    meter = CudaMemory()
    meter.restart()
    first, second = (torch.empty(GIB // 4, dtype=torch.uint8, device="cuda") for _ in range(2))
    del first
    third = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    tensors = second.nbytes + third.nbytes
    return meter.peak_bytes(), tensors, device.peak_bytes(torch.cuda.current_device())


def test_a_trial_counts_unused_blocks_of_the_allocator() -> None:
    measured, tensors, in_use = run_alone(peaks_of_a_meter, num_ranks=1)[0]
    assert measured == in_use
    assert measured > tensors


HEAD_SIZE, NUM_HEADS = 64, 8
ONE_SEQUENCE, PACK = (16384,), (8192, *[128] * 64)
"""Tokens of sequences in two packs of the same size."""


def attention_bytes(lengths: tuple[int, ...], softmax_type: str = "vanilla") -> int:
    """Peak of the backward, above what the forward leaves; of torch's kernel without an offset."""
    model = SmallModel(
        hidden_size=NUM_HEADS * HEAD_SIZE,
        num_heads=NUM_HEADS,
        num_groups=NUM_HEADS,
        variant=(("softmax_type", softmax_type),),
    )
    kind = VarlenAttention if softmax_type == "vanilla" else SegmentAttention
    attention = kind(model.transformer(), 1, AttnMaskType.causal, "self")
    options: Any = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    shape = (sum(lengths), NUM_HEADS, HEAD_SIZE)
    query, key, value = (torch.empty(shape, **options) for _ in range(3))
    out = attention.attend(query, key, value, lengths)
    gradient = torch.empty_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(gradient)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("major", [8, 9, 10])
def test_attention_takes_memory_by_tokens_of_a_pack(major: int) -> None:
    """A sequence adds at most 128 tokens, but sequences do not count by the longest of them, as in
    cuDNN's kernel, which torch prefers from capability 9.0 on."""
    one, pack = (
        run_alone(attention_bytes, lengths, num_ranks=1, STAND_IN_MAJOR=major)[0]
        for lengths in (ONE_SEQUENCE, PACK)
    )
    assert one <= pack <= one * (1 + 128 * len(PACK) / sum(PACK))


def test_attention_with_an_offset_takes_memory_by_tokens_of_a_sequence() -> None:
    """This holds although each block of queries attends to all keys before."""
    long, longer = (
        run_alone(attention_bytes, (num_tokens,), "off-by-one", num_ranks=1)[0]
        for num_tokens in (8192, 16384)
    )
    assert longer <= 2.2 * long


NUM_ELEMENTS = 2**28
"""A gibibyte of fp32 gradients."""
SMALL_BYTES = 64 * 2**20


def optimizer_peaks() -> dict[str, int]:
    """Bytes that each step of an update needs besides the shards."""
    shards = _FlatShards(NUM_ELEMENTS)
    optimizer: Any = ShardedAdamW(shards, AdamWSettings(lr=1e-3))  # type: ignore[arg-type]
    steps = {
        "divide": lambda: optimizer.divide_gradients(8),
        "norm": optimizer.squared_norm,
        "step": lambda: optimizer.step(2.0 * optimizer.settings.clip_grad),
    }
    found = {}
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


class _FlatShards:
    """One bucket of shards for the optimizer."""

    def __init__(self, num_elements: int) -> None:
        self.parameters = torch.empty(num_elements, device="cuda")
        self.gradients = torch.empty(num_elements, device="cuda")
        part = type("Part", (), {"parameter": 0, "shard_offset": 0, "num_elements": num_elements})
        bucket = type("Bucket", (), {"unit": Unit.layer(0)})
        self.layout = type(
            "Layout", (), {"parameters": [type("Spec", (), {"decays": True})], "buckets": [bucket]}
        )
        self.rectangles_of = lambda bucket: [part]


def test_an_update_needs_no_copy_of_the_shards() -> None:
    for step, num_bytes in run_alone(optimizer_peaks, num_ranks=1)[0].items():
        assert num_bytes <= SMALL_BYTES, step
