"""Counts what a rank launches, sends and waits for, in this project and in plain megatron-core.

Both sides are rank 0 of 8 on the stand-in, without peers. They train the same model on the same
tokens, plain megatron-core with its DDP and distributed optimizer and on one unpacked row.
torch.compile is off on both. Three iterations are trained and the last one is counted.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime import executor
from megatron.hydraulis.runtime.core_attention import VarlenAttention
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.model_building import (
    ModelDefinition,
    PackedNorm,
    _with_replaced,
    upstream_layer_spec,
)
from megatron.hydraulis.strategy import Pool, Strategy
from tests.cuda_stand_in.device import mark
from tests.cuda_stand_in.lone_ranks import log_of, run_alone

NUM_RANKS = 8
LENGTHS = (256,)
"""Of the sequences of a micro-batch, in tokens."""
SMALL = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=32,
    vocab_size=1024,
    gated_mlp=True,
    tied_embeddings=False,
)
NUM_ITERATIONS = 3

Side = Literal["ours", "plain"]

_BEGIN, _END = "counted begin", "counted end"

KINDS = {
    "matrix products": "cublas|_gemm",
    "core attention": "fused_attn|flash|[sS]oft[mM]ax|triu_tril|masked_fill",
    "norms": "rmsnorm|layer_norm|GammaBeta",
    "activation": "silu|sigmoid|gelu",
    "angles": "sin_kernel|cos_kernel|neg_kernel",
    "optimizer": "multi_tensor_apply|lpnorm",
    "concatenations": "CatArray",
    "copies and casts": "copy",
    "sums": "reduce_kernel",
    "fills": "FillFunctor|memory set",
    "multiplications": "MulFunctor|addcmul|DivFunctor",
    "additions": "[aA]dd",
}
"""What a launch is for, by the first pattern that its kernel's name matches."""
OTHER = "other"


@dataclass(frozen=True)
class Case:
    """A training step to count."""

    side: Side
    layers: int
    tp: int = 1
    cp: int = 1
    micro_batches: int = 1
    lengths: tuple[int, ...] = LENGTHS
    fused_gradients: bool = False
    """Whether apex's kernel adds weight gradients; its replacement launches as many kernels."""
    same_attention: bool = False
    """Whether both use our core attention by one kernel of torch's, instead of upstream's unfused
    one and, in layers of Transformer Engine, its own."""
    has_te: bool = False
    """Whether layers, and our core attention, are those of Transformer Engine, which also groups
    products of experts and sorts their tokens."""
    has_experts: bool = False
    """Whether layers have experts, balanced by sequence, that an all-to-all serves."""
    num_experts: int = 4
    """How many, if they have them."""
    has_biases: bool = False
    """Whether routers of these also have biases and a z-loss."""
    has_latents: bool = False
    """Whether attention has latents of queries, keys and values."""
    shape: ModelShape = SMALL
    """Sizes of the model, without its number of layers, experts and latents."""


@dataclass
class Counts:
    """Counts of one iteration of one rank."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels, copies and memsets by kind, without NCCL's."""
    host_waits: int = 0
    """How often the host waited for the device."""
    host_copies: int = 0
    """Copies between host and device."""
    calls: Counter[str] = field(default_factory=Counter)
    """NCCL calls by kind and size of the communicator."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that these calls read, by the same key."""

    @property
    def num_launches(self) -> int:
        """Launches of all kinds."""
        return self.launches.total()


def count(case: Case, folder: Path) -> Counts:
    """Train on rank 0 and count its last iteration; the log stays in the folder."""
    run_alone(
        train,
        case,
        num_ranks=NUM_RANKS,
        ranks=(0,),
        logs=folder,
        timeout_s=300.0,
        STAND_IN_LOG_KERNELS=1,
    )
    with log_of(folder, 0).open() as lines:
        return counts_of(lines)


def counts_of(lines: Iterable[str]) -> Counts:
    """Counts of what is between the marks in a log."""
    counts, inside = Counts(), False
    sizes: dict[str, str] = {}
    for line in lines:
        _, kind, *words = line.split()
        if kind == "COMM":
            sizes[words[0]] = words[words.index("size") + 1]
        elif kind == "MARK":
            text = " ".join(words)
            inside = text == _BEGIN or (inside and text != _END)
        elif inside:
            _count_line(counts, kind, words, sizes)
    return counts


def _count_line(counts: Counts, kind: str, words: list[str], sizes: dict[str, str]) -> None:
    if kind == "KERNEL":
        counts.launches[_kind_of(" ".join(words[2:]))] += 1
    elif kind in ("COPY", "SET"):
        counts.host_copies += words[0] in ("H2D", "D2H")
        counts.launches[_kind_of("copy" if kind == "COPY" else "memory set")] += 1
    elif kind in ("HSYNC", "COPYSYNC", "SETSYNC"):
        counts.host_waits += 1
    elif kind == "NCCL":
        what = f"{words[0]} of {sizes.get(words[2], '?')} ranks"
        counts.calls[what] += 1
        counts.sent_bytes[what] += int(words[words.index("read") + 2])


@cache
def _kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), OTHER)


def train(case: Case) -> None:
    """Run the iterations on a lone rank, the last one between marks."""
    step = step_of(case)
    for iteration in range(NUM_ITERATIONS):
        if iteration == NUM_ITERATIONS - 1:
            mark(_BEGIN)
        step(case.micro_batches)
    mark(_END)


def peak_bytes(case: Case) -> int:
    """Most bytes in tensors during the last iteration, on a lone rank.

    Upstream's optimizer is one kernel, as by apex or Transformer Engine: without these, torch's
    default takes a copy of the shard while it updates.
    """
    patch.object(torch.optim, "AdamW", partial(torch.optim.AdamW, fused=True)).start()
    step = step_of(case)
    for _ in range(NUM_ITERATIONS):
        torch.cuda.reset_peak_memory_stats()
        step(case.micro_batches)
    return torch.cuda.max_memory_allocated()


def step_of(case: Case) -> Callable[[int], object]:
    """A training step with a number of micro-batches, at most that of the case, on a lone rank."""
    if case.fused_gradients:
        patch.object(parallel_layers, "_grad_accum_fusion_available", True).start()
        patch.object(
            parallel_layers, "fused_weight_gradient_mlp_cuda", _OneKernel(), create=True
        ).start()
    return (_ours if case.side == "ours" else _plain)(case)


class _OneKernel(types.ModuleType):
    """Replaces apex's module: one launch, like its cuBLAS call."""

    def __init__(self) -> None:
        super().__init__("fused_weight_gradient_mlp_cuda")

    def wgrad_gemm_accum_fp32(self, inputs: Any, gradients: Any, main_grad: torch.Tensor) -> None:
        """One launch."""
        main_grad.mul_(1.0)


def _config(case: Case, tp: int) -> TransformerConfig:
    shape = case.shape
    variant: dict[str, Any] = {}
    if case.has_experts:
        variant = {
            "num_moe_experts": case.num_experts,
            "moe_ffn_hidden_size": 256,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": case.has_te,
            "moe_permute_fusion": case.has_te,
        }
    if case.has_biases:
        variant |= {"moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 1e-3}
        variant["moe_router_enable_expert_bias"] = True
    if case.has_latents:
        variant |= {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_head_dim": 32}
        variant |= {"qk_pos_emb_head_dim": 16, "v_head_dim": 32, "rope_type": "rope"}
        variant["qk_layernorm"] = True
    make: Any = MLATransformerConfig if case.has_latents else TransformerConfig
    config: TransformerConfig = make(
        num_layers=case.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_attention_heads if case.has_latents else shape.num_query_groups,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        apply_rope_fusion=case.has_te and not case.has_latents,
        gradient_accumulation_fusion=case.fused_gradients or case.has_te,
        persist_layer_norm=False,
        transformer_impl="transformer_engine" if case.has_te else "local",
        calculate_per_token_loss=True,
        **variant,
    )
    return config


def _layer_spec(config: TransformerConfig) -> Any:
    if config.num_moe_experts is not None:
        return upstream_layer_spec(config, use_te=False)
    return get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=config.multi_latent_attention,
        multi_latent_attention=config.multi_latent_attention,
    )


def _ours(case: Case) -> Callable[[int], object]:
    scheme = "".join(f"{axis}{size}" for axis, size in (("tp", case.tp), ("cp", case.cp)))
    strategy = Strategy.parse(f"{NUM_RANKS // (case.tp * case.cp)}*{scheme}", NUM_RANKS)
    transformer = _config(case, 1)
    definition = ModelDefinition(
        transformer=transformer,
        built_layer_spec=upstream_layer_spec(transformer, use_te=True) if case.has_te else None,
        layer_spec=_layer_spec(transformer),
        vocab_size=case.shape.vocab_size,
        padded_vocab_size=case.shape.vocab_size,
        max_sequence_length=max(case.lengths),
        core_attention="te" if case.has_te and not case.same_attention else "torch",
    )
    engine = RuntimeEngine(definition, Pool.of(strategy), AdamWSettings(lr=1e-3), seed=1)
    # The check of the loss ends with the first that is not zero, and here all are zero.
    patch.object(executor, "check_loss_function", lambda *_, **__: True).start()
    step = executor.make_forward_step()
    sequences = [np.arange(length + 1) % case.shape.vocab_size for length in case.lengths]
    batches = [
        pack(sequences, case.tp, context_size=case.cp).pinned().to(engine.device, non_blocking=True)
        for _ in range(case.micro_batches)
    ]
    return lambda num: engine.train_step(
        strategy.name, batches[:num], step, next_strategy=strategy.name
    )


def _plain(case: Case) -> Callable[[int], object]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    config = _config(case, case.tp)
    num_tokens = sum(case.lengths)
    # Upstream's torch norm refuses sequence parallelism, so both sides use ours.
    replaced: dict[Any, Any] = {WrappedTorchNorm: PackedNorm}
    if case.same_attention:
        replaced |= {DotProductAttention: VarlenAttention, TEDotProductAttention: VarlenAttention}
    spec = upstream_layer_spec(config, use_te=True) if case.has_te else _layer_spec(config)
    if not isinstance(spec, TransformerBlockSubmodules):
        spec = TransformerBlockSubmodules(
            layer_specs=[spec] * case.layers, layer_norm=WrappedTorchNorm
        )
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=_with_replaced(spec, replaced),
        vocab_size=case.shape.vocab_size,
        max_sequence_length=num_tokens,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        Float16Module(config, model),
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    optimizer: Any = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.no_sync_func = model.no_sync
    config.grad_sync_func = model.start_grad_sync
    config.param_sync_func = model.start_param_sync
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    tokens = torch.arange(num_tokens, device="cuda")[None]
    mask = torch.ones(1, num_tokens, device="cuda")

    def run_model(_: Any, model: Any) -> Any:
        return model(tokens, tokens, None, labels=tokens), loss_of_tokens

    def loss_of_tokens(output: Any) -> Any:
        loss, num_tokens, report = executor.loss_func(mask, output)
        return loss, num_tokens.int(), report  # upstream counts in whole numbers

    def step(num_micro_batches: int) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward_no_pipelining(
            forward_step_func=run_model,
            data_iterator=iter(()),
            model=model,
            num_microbatches=num_micro_batches,
            seq_length=num_tokens,
            micro_batch_size=1,
        )
        optimizer.step()
        # As upstream's training step reports the loss of the iteration.
        total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        total.tolist()

    return step
