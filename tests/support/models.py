"""Small models for tests, and a run of them through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import gelu, silu

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.lora import Lora, adapters
from megatron.hydraulis.model_shape import ModelShape, layers_with_experts
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch
from megatron.hydraulis.runtime import adapters as runtime_adapters
from megatron.hydraulis.runtime.core_attention import CoreAttentionName
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.model_building import (
    ModelDefinition,
    hybrid_layer_spec,
    packed_block_spec,
    upstream_layer_spec,
)
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.gloo_pool import worker_groups
from tests.support.planning import TableCostModel

LATENT_SIZES = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass(frozen=True)
class SmallModel:
    """A small model with GQA, SwiGLU and a padded vocabulary."""

    num_layers: int = 4
    layer_pattern: str = ""
    """The kinds of ``num_layers`` layers of a hybrid model; empty for a GPT."""
    hidden_size: int = 32
    ffn_hidden_size: int = 48
    num_heads: int = 4
    num_groups: int = 4
    vocab_size: int = 61
    padded_vocab_size: int = 64
    dtype: torch.dtype = torch.float64
    tied: bool = False
    sequence_parallel: bool = True
    qk_layernorm: bool = False
    bias: bool = False
    normalization: str = "RMSNorm"
    swiglu: bool = True
    position_embedding: str = "rope"
    core_attention: CoreAttentionName = "sdpa"
    cp_comm_type: str | None = None
    decays_qk_norms: bool = False
    variant: tuple[tuple[str, Any], ...] = ()
    """Other fields of upstream's configuration, with their values."""
    has_te_layers: bool = False
    """On CUDA; the reference on the CPU has local layers."""
    fuses_rope: bool = False
    """Whether Transformer Engine's kernel rotates, on CUDA."""
    loss_chunk_tokens: int | None = 7
    """Fewer than most rows have."""
    frozen: tuple[str, ...] = ()
    """Beginnings of the names of parameters that a model provider freezes."""
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers with adapters, as in --lora-targets."""

    def shape(self) -> ModelShape:
        """The sizes that adapters depend on."""
        variant = dict(self.variant)
        num_experts = variant.get("num_moe_experts", 0)
        has_experts = layers_with_experts(self.num_layers, variant.get("moe_layer_freq", 1))
        latents = {
            name: variant.get(name) or 0
            for name in ("q_lora_rank", "kv_lora_rank", *LATENT_SIZES)
            if "kv_lora_rank" in variant
        }
        channels = latents["qk_head_dim"] + latents["qk_pos_emb_head_dim"] if latents else 0
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_groups,
            kv_channels=channels or self.hidden_size // self.num_heads,
            vocab_size=self.padded_vocab_size,
            gated_mlp=self.swiglu,
            tied_embeddings=self.tied,
            output_gate=variant.get("attention_output_gate", False),
            num_experts=num_experts,
            num_expert_layers=sum(has_experts) if num_experts else 0,
            experts_per_token=variant.get("moe_router_topk", 2) if num_experts else 0,
            expert_ffn_hidden_size=variant.get("moe_ffn_hidden_size", 0),
            shared_expert_ffn_hidden_size=variant.get("moe_shared_expert_intermediate_size", 0),
            **latents,
        )

    @property
    def lora(self) -> Lora | None:
        """Adapters of rank 3 at the targets; None without targets."""
        return Lora.resolve(3, 4.5, self.lora_targets, self.shape()) if self.lora_targets else None

    def transformer(self) -> TransformerConfig:
        """Upstream's configuration of the whole model."""
        # Fields have to be hashable here, and lists there.
        variant = {
            name: list(value) if name == "moe_layer_freq" and isinstance(value, tuple) else value
            for name, value in self.variant
        }
        is_latent = "kv_lora_rank" in variant
        has_te = self.has_te_layers and torch.cuda.is_available()
        if has_te and "num_moe_experts" in variant:
            variant = {"moe_grouped_gemm": True, "moe_permute_fusion": True} | variant
        return (MLATransformerConfig if is_latent else TransformerConfig)(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_groups,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            normalization=self.normalization,
            gated_linear_unit=self.swiglu,
            **({"activation_func": silu if self.swiglu else gelu} | variant),
            add_bias_linear=self.bias,
            add_qkv_bias=self.bias,
            qk_layernorm=self.qk_layernorm,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=self.fuses_rope and torch.cuda.is_available(),
            gradient_accumulation_fusion=has_te,
            persist_layer_norm=False,
            transformer_impl="transformer_engine" if has_te else "local",
            cp_comm_type=self.cp_comm_type,
            init_method_std=0.1,
            is_hybrid_model=bool(self.layer_pattern),
        )

    def layer_spec(self, transformer: TransformerConfig) -> Any:
        """Upstream's local layers."""
        if self.layer_pattern:
            return hybrid_layer_spec(transformer, use_te=False)
        if transformer.num_moe_experts is not None:
            return upstream_layer_spec(transformer, use_te=False)
        return get_gpt_layer_local_spec(
            qk_layernorm=self.qk_layernorm,
            normalization=self.normalization,
            multi_latent_attention=transformer.multi_latent_attention,
        )

    def definition(self) -> ModelDefinition:
        """The definition that the engine takes."""
        transformer = self.transformer()
        has_te = self.has_te_layers and torch.cuda.is_available()
        return ModelDefinition(
            transformer=transformer,
            layer_spec=self.layer_spec(transformer),
            layer_pattern=self.layer_pattern,
            built_layer_spec=upstream_layer_spec(transformer, use_te=True) if has_te else None,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            max_sequence_length=256,
            position_embedding_type=self.position_embedding,
            tied_embeddings=self.tied,
            sequence_parallel=self.sequence_parallel,
            core_attention=self.core_attention,
            decays_qk_norms=self.decays_qk_norms,
            loss_chunk_tokens=self.loss_chunk_tokens,
            model_provider=self.frozen_stage if self.frozen else None,
            lora=self.lora,
            adapters=tuple(adapters(self.shape())) if self.lora_targets else (),
        )

    def frozen_stage(
        self, pre_process: bool, post_process: bool, config: Any, pg_collection: Any
    ) -> GPTModel:
        """A user's model provider, which knows names in its stage only."""
        stage = GPTModel(
            config=config,
            transformer_layer_spec=packed_block_spec(self.layer_spec(config), config.num_layers),
            vocab_size=self.padded_vocab_size,
            max_sequence_length=256,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type=self.position_embedding,
            pg_collection=pg_collection,
        )
        self.freeze(stage)
        return stage

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze what the settings say, by name."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))


class _StartedLowRank(runtime_adapters.LowRank):
    """B does not begin with 0, with which A would have no gradient."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with torch.no_grad():
            self.lora_B.uniform_(-0.1, 0.1)


def started_adapters() -> Any:
    """Within, models are built with adapters that change the output from the beginning."""
    return patch.object(runtime_adapters, "LowRank", _StartedLowRank)


def most_of_every_layer(num_layers: int) -> tuple[str, ...]:
    """What `SmallModel.frozen` is where norms, second matrices of MLPs and routers are trained."""
    matrices = "self_attention.linear_", "mlp.linear_fc1."
    of_layers = [f"decoder.layers.{i}.{name}" for i in range(num_layers) for name in matrices]
    return "embedding.", "output_layer.", *of_layers


ROW_LIMIT = 40
"""Limit of a row's tokens after rounding up to the quantum."""


@dataclass(frozen=True)
class Assignment:
    """A plan in its simplest form: for each replica, micro-batches of sequence indices."""

    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    groups: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...] = ()
    """For each replica and micro-batch the context groups of a wave, as [offset, size, sequences];
    one group of all cp ranks if the
list is empty."""

    def micro_batches(self, replica: int, batch: tuple[np.ndarray, ...]) -> list[MicroBatch]:
        """The micro-batches of a replica, as a plan has them."""
        shares = self.replicas[replica]
        groups = self.groups[replica] if self.groups else [()] * len(shares)
        return [
            MicroBatch(
                indices,
                tuple(len(batch[i]) - 1 for i in indices),
                tuple(ContextGroup(*group) for group in wave),
            )
            for indices, wave in zip(shares, groups, strict=True)
        ]


@dataclass(frozen=True)
class Job:
    """A run to compare: model, strategies, batches, plans."""

    model: SmallModel
    strategies: tuple[str, ...]
    schedule: tuple[int, ...]
    """Which strategy each iteration runs."""
    assignments: tuple[Assignment, ...]
    """One per iteration."""
    batches: tuple[tuple[np.ndarray, ...], ...]
    """Sequences (length + 1 tokens) of each iteration."""
    weights: tuple[tuple[np.ndarray, ...], ...] = ()
    """(length + 1,) weights of predicting the tokens of each sequence; 1 if there are none."""
    extra_tp: tuple[str, ...] = ()
    """Strategies that only raise T."""
    num_atoms: int | None = None
    """T, if the job has too few ranks for a strategy that would raise it."""
    pad_multiple: int = 1
    """Every pack is padded to this and to the replica's tp."""
    row_quantum: int = 1
    """Rows are rounded up to it as in a plan of --row-quantum-tokens, up to ROW_LIMIT tokens."""
    settings: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(lr=1e-2, eps=1e-5, weight_decay=0.1, clip_grad=0.5)
    )
    seed: int = 7
    ranks_per_node: int | None = None
    """One node if None."""
    overlap: bool = True
    num_slots: int = 2
    num_layers_ahead: int = 1
    """Gathered ahead where columns share weights."""
    owners_for: str | None = None
    """A strategy; if None, rank r owns share r."""
    gradient_dtype: torch.dtype | None = None
    """In which gradients travel; None for that in which they are added up."""
    knows_next: bool = True
    """Whether an iteration knows the strategy of the next one."""

    def weights_of(self, iteration: int) -> tuple[np.ndarray, ...] | None:
        """Weights of an iteration's sequences, as `pack` takes them."""
        return self.weights[iteration] if self.weights else None

    def weight_sum(self, iteration: int) -> float:
        """The divisor of an iteration's gradients."""
        if not self.weights:
            return sum(len(tokens) - 1 for tokens in self.batches[iteration])
        return sum(float(each[1:].sum(dtype=np.float64)) for each in self.weights[iteration])


@dataclass(frozen=True)
class RankRun:
    """One rank's results of a run."""

    names: tuple[str, ...]
    rectangles: tuple[Any, ...]
    gradients: tuple[np.ndarray, ...]
    """Flat shards after division by tokens and before clipping, per iteration."""
    parameters: tuple[np.ndarray, ...]
    """Flat shards after each iteration."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    shapes: dict[str, tuple[int, ...]]
    biases: tuple[np.ndarray, ...] = ()
    """Those of routers after each iteration, (layers, experts); none in a model without them."""
    frozen_rectangles: tuple[Any, ...] = ()
    frozen: tuple[np.ndarray, ...] = ()
    """Flat frozen shards after each iteration."""
    prediction_losses: tuple[tuple[float, ...], ...] = ()
    """Those of each layer of multi-token prediction, per iteration."""


def sequences(rng: np.random.Generator, lengths: list[int], vocab_size: int) -> tuple[Any, ...]:
    """Random sequences of the given lengths (of trained tokens)."""
    return tuple(rng.integers(0, vocab_size, size=length + 1) for length in lengths)


def spread(num_sequences: int, num_replicas: int, per_micro_batch: int = 2) -> Assignment:
    """Distribute sequences so that replicas get unequal numbers of micro-batches."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    for index in range(num_sequences):
        # Replica r gets about r + 1 shares: unequal on purpose.
        weights = [(len(share) + 1) / (r + 1) for r, share in enumerate(shares)]
        shares[weights.index(min(weights))].append(index)
    return Assignment(
        tuple(
            tuple(
                tuple(share[i : i + per_micro_batch + (i > 0)])
                for i in _starts(len(share), per_micro_batch)
            )
            for share in shares
        )
    )


def _starts(count: int, size: int) -> list[int]:
    starts = [0] if count else []
    at = size
    while at < count:
        starts.append(at)
        at += size + 1
    return starts


def use_fp64_loss() -> None:
    """Upstream's cross entropy, output gate and routers round to fp32; comparisons to 1e-10 must
    not."""

    def calculate_logits_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits, torch.max(logits, dim=-1)[0]

    def apply_output_gate(self: Attention, given: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return given * torch.sigmoid(gate.reshape(given.shape))

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(calculate_logits_max)
    Attention._apply_output_gate = apply_output_gate
    # The first scale that is set determines the dtype of all others in the process.
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for name in ("topk_routing_with_score_function", "compute_routing_scores_for_aux_loss"):
        setattr(router, name, _without_fp32(getattr(moe_utils, name)))


class _WideTorch:
    """Replaces the module `torch` for functions that round to fp32 by name."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_fp32(function: Any) -> Any:
    """A function of `moe_utils` that computes with fp64 tensors in fp64."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

    def call(logits: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if logits.dtype != torch.float64:
            return function(logits, *arguments, **named)
        with (
            patch.object(moe_utils, "torch", _WideTorch()),
            patch.object(torch.Tensor, "float", keep),
        ):
            return function(logits, *arguments, **named)

    return call


def run_job(job: Job) -> RankRun:
    """Every rank runs all iterations of the job."""
    use_fp64_loss()
    engine = build_engine(job)
    forward_step = make_forward_step()
    gradients, parameters, losses, norms, biases, frozen = [], [], [], [], [], []
    prediction_losses = []
    upcoming = [*job.schedule[1:], None] if job.knows_next else [None] * len(job.schedule)
    for i, (which, following, assignment, batch) in enumerate(
        zip(job.schedule, upcoming, job.assignments, job.batches, strict=True)
    ):
        strategy = engine.pool.strategies[which]
        mine = [
            packed.to(engine.device)
            for packed in packs_of_rank(
                strategy,
                assignment,
                batch,
                engine.rank,
                job.pad_multiple,
                job.row_quantum,
                job.weights_of(i),
                engine.definition.num_predictions,
            )
        ]
        outcome = engine.train_step(
            strategy.name,
            mine,
            forward_step,
            next_strategy=None if following is None else engine.pool.strategies[following].name,
        )
        norm = outcome.gradient_norm or 0.0
        clip = job.settings.clip_grad
        scale = clip / (norm + 1.0e-6) if outcome.updated and norm > clip else 1.0
        gradients.append((engine.shards.gradients / scale).cpu().numpy().copy())
        parameters.append(engine.shards.parameters.cpu().numpy().copy())
        frozen.append(engine.shards.frozen.double().cpu().numpy())
        losses.append(outcome.loss.mean)
        prediction_losses.append(outcome.prediction_losses)
        norms.append(norm)
        if engine.routers is not None and engine.routers.biases is not None:
            biases.append(engine.routers.biases.cpu().numpy().copy())
    run = rank_run(engine, gradients, parameters, losses, norms)
    return replace(
        run,
        biases=tuple(biases),
        frozen=tuple(frozen),
        prediction_losses=tuple(prediction_losses),
    )


def build_engine(job: Job, spans: SpanRecorder = NO_SPANS) -> RuntimeEngine:
    """Every rank builds the engine of a job and sets its initial weights."""
    world_size = torch.distributed.get_world_size()
    strategies = [
        Strategy.parse(text, world_size, name=text, ranks_per_node=job.ranks_per_node)
        for text in (*job.strategies, *job.extra_tp)
    ]
    with started_adapters():
        return RuntimeEngine(
            job.model.definition(),
            Pool.of(*strategies),
            job.settings,
            seed=job.seed,
            groups=worker_groups(),
            num_atoms=job.num_atoms,
            owners_for=job.owners_for,
            gradient_dtype=job.gradient_dtype,
            overlap=job.overlap,
            num_slots=job.num_slots,
            num_layers_ahead=job.num_layers_ahead,
            spans=spans,
        )


def rank_run(
    engine: RuntimeEngine,
    gradients: list[np.ndarray],
    parameters: list[np.ndarray],
    losses: list[float],
    norms: list[float],
) -> RankRun:
    """The rank's results: its flat shards and their places in the whole tensors."""
    return RankRun(
        names=tuple(spec.name for spec in engine.layout.parameters),
        rectangles=tuple(engine.shards.rectangles()),
        frozen_rectangles=tuple(engine.shards.rectangles(frozen=True)),
        gradients=tuple(gradients),
        parameters=tuple(parameters),
        losses=tuple(losses),
        norms=tuple(norms),
        shapes={spec.name: spec.shape for spec in engine.layout.parameters},
    )


def run_initial_weights(job: Job) -> RankRun:
    """Every rank returns the initial weights, as the only entry of `parameters`."""
    engine = build_engine(job)
    return rank_run(engine, [], [engine.shards.parameters.cpu().numpy().copy()], [], [])


def packs_of_rank(
    strategy: Strategy,
    assignment: Assignment,
    batch: tuple[np.ndarray, ...],
    rank: int,
    pad_multiple: int = 1,
    row_quantum: int = 1,
    weights: tuple[np.ndarray, ...] | None = None,
    num_predictions: int = 0,
) -> list[PackedBatch]:
    """The rank's part of each micro-batch of its replica."""
    limits = Limits(TableCostModel(default_limit=ROW_LIMIT), row_quantum=row_quantum)
    for index, replica in enumerate(strategy.replicas):
        position = replica.position_of(rank)
        if position is None:
            continue
        packs = []
        for micro_batch in assignment.micro_batches(index, batch):
            share = micro_batch.share_of(position.cp, replica.scheme.cp)
            scheme = replica.scheme.of_context_group(share.group.size)
            packs.append(
                pack(
                    [batch[i] for i in share.sequences],
                    math.lcm(replica.scheme.tp, pad_multiple),
                    weights=None if weights is None else [weights[i] for i in share.sequences],
                    context_size=share.group.size,
                    context_rank=position.cp - share.group.offset,
                    row_tokens=limits.row_tokens(strategy, scheme, share.lengths),
                    allow_empty=True,
                    num_predictions=num_predictions,
                )
            )
        return packs
    return []


def assemble(
    runs: list[RankRun], flats: list[np.ndarray], *, frozen: bool = False
) -> dict[str, np.ndarray]:
    """Whole tensors by name, from every rank's flat shards: those that are trained, or frozen."""
    whole: dict[str, np.ndarray] = {}
    for run, flat in zip(runs, flats, strict=True):
        for part in run.frozen_rectangles if frozen else run.rectangles:
            name = run.names[part.parameter]
            if name not in whole:
                whole[name] = np.full(run.shapes[name], np.nan, dtype=np.float64)
            matrix = whole[name].reshape(whole[name].shape[0], -1)
            values = flat[part.shard_offset : part.shard_offset + part.num_elements]
            matrix[
                part.first_row : part.first_row + part.num_rows,
                part.first_column : part.first_column + part.num_columns,
            ] = values.reshape(part.num_rows, part.num_columns)
    return whole
