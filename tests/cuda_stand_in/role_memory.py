"""Memory of one rank of a job with the sizes of real models, on the stand-in: phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.trained_model import NO_RECOMPUTE, Recompute
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.lora import adapters
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.core_attention import CoreAttentionName
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.memory import CudaMemory
from megatron.hydraulis.runtime.memory_trial import StrategyTrial, TrialResult
from megatron.hydraulis.runtime.model_building import (
    ModelDefinition,
    packed_block_spec,
    upstream_layer_spec,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.cuda_stand_in import device

NUM_ITERATIONS = 3
"""The second gathers during the first's update, the third when it begins, with everything that the
others left allocated."""
LONGEST_TOKENS = 32768
"""Of a sequence: larger packed rows have several."""
FIRST_PHASE = "start"


@dataclass(frozen=True, kw_only=True)
class Role:
    """One rank of a job, by everything that determines its memory except the number of tokens."""

    shape: ModelShape
    strategy: str
    rank: int = 0
    num_ranks: int = 64
    recompute: Recompute = NO_RECOMPUTE
    precision: Precision = Precision.BF16
    gradient_bytes: int = 4
    """Of a gradient on the wire."""
    sequence_parallel: bool = True
    cp_comm_type: str = "p2p"
    qk_norms: bool = False
    context_size: int | None = None
    """Ranks that share a row; all cp ranks if None."""
    ranks_per_node: int = 8
    has_te: bool = False
    """Whether layers and core attention are those of Transformer Engine."""
    has_separate_gate: bool = False
    """Whether the gate of the MLP has an offset and a limit, for which no kernel is fused."""
    has_biases: bool = False
    """Whether a gated MLP and the experts have biases, and a sigmoid of quick GELU: GPT-OSS."""
    softmax_type: str = "vanilla"
    has_wide_norms: bool = False
    """Whether norms are centred around one."""
    has_wide_router: bool = False
    """Whether tokens are routed in fp32."""
    has_sigmoid_router: bool = False
    """Whether experts are chosen by sigmoid scores and biases, not by softmax scores."""
    has_router_losses: bool = False
    """Whether routers have a balancing loss and a z-loss."""
    frozen: Frozen = NOTHING_FROZEN
    """What a model provider freezes, or all but adapters."""

    def __str__(self) -> str:
        recompute = self.recompute
        parts = [
            f"{self.shape.num_parameters / 1e9:.0f}B",
            f"{self.scheme}",
            f"stage {self.stage}" if self.scheme.pp > 1 else "",
            f"{self.cp_comm_type}" if self.scheme.cp > 1 else "",
            f"in groups of {self.context_size}" if self.context_size else "",
            "fp32" if self.precision is Precision.FP32 else "",
            "gradients in bf16" if self.gradient_bytes == 2 else "",
            "" if self.sequence_parallel else "no sequence parallelism",
            f"{recompute.granularity} {recompute.method or ''} {recompute.num_layers or ''} "
            f"{' '.join(recompute.modules)}"
            if recompute.granularity
            else "",
            "latents" if self.shape.kv_lora_rank else "",
            "norms of queries and keys" if self.qk_norms else "",
            "tied" if self.shape.tied_embeddings else "",
            "output gate" if self.shape.output_gate else "",
            f"predicts {self.shape.num_predictions} more" if self.shape.num_predictions else "",
            f"windows of {self.shape.window_tokens}" if self.shape.num_windowed_layers else "",
            "separate gate" if self.has_separate_gate else "",
            "GPT-OSS layers" if self.has_biases else "",
            f"softmax {self.softmax_type}" if self.softmax_type != "vanilla" else "",
            "norms around one" if self.has_wide_norms else "",
            f"{self.shape.experts_per_token} of {self.shape.num_experts} experts"
            if self.shape.num_experts
            else "",
            "sigmoid and biases" if self.has_sigmoid_router else "",
            "routed in fp32" if self.has_wide_router else "",
            "balancing and z-loss" if self.has_router_losses else "",
            "Transformer Engine" if self.has_te else "",
            f"adapters of {self.frozen.lora}" if self.frozen.lora else "",
            f"frozen {self.frozen}" if self.frozen.layers and not self.frozen.lora else "",
        ]
        return " ".join(" ".join(part.split()) for part in parts if part)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of an iteration, in which stages of a pipeline alternate between
        forwards and backwards."""
        return self.scheme.pp + 2 if self.scheme.pp > 1 else 1

    @property
    def fuses_rope(self) -> bool:
        """True if Transformer Engine's kernel rotates, which it does not for latents."""
        return self.has_te and not self.shape.kv_lora_rank

    @property
    def pool(self) -> Pool:
        """The job's pool: the role's strategy alone."""
        return Pool.of(
            Strategy.parse(self.strategy, self.num_ranks, ranks_per_node=self.ranks_per_node)
        )

    @property
    def scheme(self) -> Scheme:
        """The scheme of the rank's replica."""
        replica = self.pool.strategies[0].replica_of(self.rank)
        assert replica is not None
        return replica.scheme

    @property
    def stage(self) -> int:
        """The rank's stage in its pipeline."""
        replica = self.pool.strategies[0].replica_of(self.rank)
        position = None if replica is None else replica.position_of(self.rank)
        assert position is not None
        return position.stage


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Measured bytes of a rank; phases as the engine names them."""

    allocated: dict[str, int]
    """Peak of tensors in a phase."""
    reserved: dict[str, int]
    """Peak of torch's allocator."""
    device_bytes: int
    """Peak in use on the device."""
    num_retries: int
    """How often the allocator had none left and freed what no tensor was in."""

    @property
    def peak_bytes(self) -> int:
        """The peak of all phases."""
        return max(self.allocated.values())


def measure(role: Role, num_tokens: int) -> RoleMemory:
    """Run iterations.

    Args:
        role: this process, alone.
        num_tokens: of a micro-batch over all ranks that share it.
    """
    pool = role.pool
    strategy = pool.strategies[0]
    engine = RuntimeEngine(
        definition_of(role),
        pool,
        AdamWSettings(lr=1e-3),
        seed=1,
        gradient_dtype=torch.bfloat16 if role.gradient_bytes == 2 else None,
    )
    batches = [_batch(role, num_tokens).to(engine.device)] * role.num_micro_batches
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}

    def note(phase: str) -> None:
        allocated[phase] = max(allocated.get(phase, 0), torch.cuda.max_memory_allocated())
        reserved[phase] = max(reserved.get(phase, 0), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        note("between phases")
        yield
        note(name)

    note(FIRST_PHASE)
    for iteration in range(NUM_ITERATIONS):
        outcome = engine.train_step(
            strategy.name,
            batches,
            make_forward_step(),
            next_strategy=strategy.name if iteration == 0 else None,
            phase=phase,
        )
        assert outcome.updated
    note("between phases")
    return RoleMemory(
        allocated=allocated,
        reserved=reserved,
        device_bytes=device.peak_bytes(torch.cuda.current_device()),
        num_retries=torch.cuda.memory_stats()["num_alloc_retries"],
    )


def try_out(role: Role, num_tokens: int) -> TrialResult:
    """The result of a memory trial with a limit."""
    engine = RuntimeEngine(definition_of(role), role.pool, AdamWSettings(lr=1e-3), seed=1)
    (strategy,) = role.pool.strategies
    scheme = role.scheme.of_context_group(role.context_size or role.scheme.cp)
    trial = StrategyTrial(
        engine=engine,
        strategy=strategy,
        forward_step=make_forward_step(),
        meter=CudaMemory(),
        longest_tokens=LONGEST_TOKENS,
        vocab_size=role.shape.vocab_size,
    )
    (result,) = trial.results(lambda asked: num_tokens if asked == scheme else 0)
    return result


def definition_of(role: Role) -> ModelDefinition:
    """A Llama, or a GPT of the same sizes if the MLP is not gated."""
    shape, recompute = role.shape, role.recompute
    dtype = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}[role.precision]
    normalization = "RMSNorm" if shape.gated_mlp else "LayerNorm"
    has_windows = shape.num_windowed_layers > 0
    again: dict[str, Any] = {}
    if recompute.granularity == "full":
        again = {"method": recompute.method, "num_layers": recompute.num_layers}
    elif recompute.granularity == "selective":
        again = {"modules": list(recompute.modules)}
    latents: dict[str, Any] = {}
    if shape.kv_lora_rank:
        names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        latents = {name: getattr(shape, name) for name in names}
        latents |= {"q_lora_rank": shape.q_lora_rank or None, "rope_type": "yarn"}
    make: Any = MLATransformerConfig if latents else TransformerConfig
    transformer = make(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization=normalization,
        qk_layernorm=role.qk_norms,
        gated_linear_unit=shape.gated_mlp,
        activation_func=_activation_of(role),
        glu_linear_offset=1.0 if role.has_separate_gate else 0.0,
        activation_func_clamp_value=7.0 if role.has_separate_gate else None,
        layernorm_zero_centered_gamma=role.has_wide_norms,
        attention_output_gate=shape.output_gate,
        softmax_type=role.softmax_type,
        window_size=(shape.window_tokens - 1, 0) if has_windows else None,
        window_attn_skip_freq=(
            [int(i < shape.num_windowed_layers) for i in range(shape.num_layers)]
            if has_windows
            else None
        ),
        add_bias_linear=role.has_biases or not shape.gated_mlp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=not role.has_separate_gate,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        apply_rope_fusion=role.fuses_rope,
        gradient_accumulation_fusion=role.has_te,
        persist_layer_norm=False,
        transformer_impl="transformer_engine" if role.has_te else "local",
        cp_comm_type=role.cp_comm_type,
        **_expert_settings(role),
        mtp_num_layers=shape.num_predictions or None,
        recompute_granularity=recompute.granularity,
        **latents,
        **{f"recompute_{name}": value for name, value in again.items()},
    )
    layer_spec = (
        upstream_layer_spec(transformer, use_te=False)
        if shape.num_experts
        else get_gpt_layer_local_spec(
            normalization=normalization,
            qk_layernorm=role.qk_norms,
            multi_latent_attention=bool(latents),
        )
    )
    definition = ModelDefinition(
        transformer=transformer,
        layer_spec=layer_spec,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        max_sequence_length=LONGEST_TOKENS,
        built_layer_spec=upstream_layer_spec(transformer, use_te=True) if role.has_te else None,
        core_attention=core_attention_of(role),
        tied_embeddings=shape.tied_embeddings,
        sequence_parallel=role.sequence_parallel,
        lora=role.frozen.lora,
        adapters=tuple(adapters(shape)),
    )
    if role.frozen.lora is None and role.frozen != NOTHING_FROZEN:
        return replace(definition, model_provider=partial(_frozen_stage, definition, role.frozen))
    return definition


def _frozen_stage(definition: ModelDefinition, frozen: Frozen, **options: Any) -> GPTModel:
    """What a user's model provider returns; of a stage of several, what is frozen is not asked."""
    stage = GPTModel(
        transformer_layer_spec=packed_block_spec(
            definition.layer_spec,
            options["config"].num_layers,
            core_attention=definition.core_attention,
        ),
        vocab_size=definition.padded_vocab_size,
        max_sequence_length=definition.max_sequence_length,
        parallel_output=True,
        share_embeddings_and_output_weights=definition.tied_embeddings,
        position_embedding_type=definition.position_embedding_type,
        **options,
    )
    beginnings = [f"decoder.layers.{layer}." for layer in frozen.layers]
    beginnings += ["embedding."] * frozen.embedding
    beginnings += ["decoder.final_layernorm.", "output_layer."] * frozen.output
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(beginnings)))
    return stage


def _activation_of(role: Role) -> Callable[..., torch.Tensor]:
    if role.has_biases:
        return quick_gelu
    return F.silu if role.shape.gated_mlp else F.gelu


def _expert_settings(role: Role) -> dict[str, Any]:
    shape = role.shape
    if not shape.num_experts:
        return {}
    num_dense = shape.num_layers - shape.num_expert_layers
    return {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [0] * num_dense + [1] * shape.num_expert_layers,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden_size or None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": role.has_te,
        "moe_permute_fusion": role.has_te,
        "moe_router_load_balancing_type": "seq_aux_loss" if role.has_router_losses else "none",
        "moe_aux_loss_coeff": 0.01 * role.has_router_losses,
        "moe_z_loss_coeff": 0.001 if role.has_router_losses else None,
        "moe_router_score_function": "sigmoid" if role.has_sigmoid_router else "softmax",
        "moe_router_enable_expert_bias": role.has_sigmoid_router,
        "moe_router_dtype": "fp32" if role.has_wide_router else None,
    }


def core_attention_of(role: Role) -> CoreAttentionName:
    if role.precision is Precision.FP32 or role.softmax_type != "vanilla":
        return "sdpa"
    # The others are refused, see `te_obstacle`.
    return "te" if role.has_te and role.shape.kv_channels % 16 == 0 else "torch"


def _batch(role: Role, num_tokens: int) -> PackedBatch:
    scheme = role.scheme
    size = role.context_size or scheme.cp
    replica = role.pool.strategies[0].replica_of(role.rank)
    position = None if replica is None else replica.position_of(role.rank)
    assert position is not None
    quantum = scheme.of_context_group(size).token_quantum
    longest = LONGEST_TOKENS // quantum * quantum
    lengths = [longest] * (num_tokens // longest) + [num_tokens % longest // quantum * quantum]
    tokens = np.zeros(longest + 1, dtype=np.int64)
    return pack(
        [tokens[: length + 1] for length in lengths if length],
        scheme.tp,
        context_size=size,
        context_rank=position.cp % size,
        num_predictions=role.shape.num_predictions,
    )
