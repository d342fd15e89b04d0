"""Memory of the fullest rank in fixed-length training under a layout.

A rank of stage i holds

    bf16 weights and gradients        4 bytes a parameter of the stage / tp
    ZeRO-1: fp32 weights, moments     12 bytes a parameter / tp / dp
    activations kept for the backward layers · min(m, pp-i) micro-batches in flight · n tokens ·
                                      what a layer keeps a token (its input alone, when it is
                                      recomputed)
    at work                           the layer in its backward, or logits and loss (last stage)
    reserve                           context, communicators

with m micro-batches a replica. Activations take `fragmentation` more than their tensors.
What a layer keeps a token, in bytes:

    2·h·(hidden states + norm states)/shares + (2·states·(2q+2kv)/4 + 2·rows·ffn)/tp
    + score bytes·s·heads/tp

where shares is tp with sequence parallelism and 1 without (arXiv 2205.05198 §4 counts alike).
"""

from dataclasses import dataclass

from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.layout import FixedLengthJob, Layout
from megatron.hydraulis.cost_model.layout_constants import LayoutConstants

__all__ = ["RankMemory", "rank_memory", "usable_bytes"]

_BF16_BYTES = 2
# Weights and gradients.
_ROLE_BYTES = 2 * _BF16_BYTES
# Master weights and two moments, fp32.
_OPTIMIZER_BYTES = 12
# Query, key, value and output: one hidden state each where heads are not grouped.
_ATTENTION_STATES = 4
# Gate, up and down: the rows of the MLP are counted for three matrices.
_GATED_MATRICES = 3


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank by what they are for."""

    stage: int
    weights_bytes: float
    """Weights and gradients in bf16."""
    optimizer_bytes: float
    """Its share of fp32 weights and moments."""
    activations_bytes: float
    """Kept for the backward."""
    working_bytes: float
    """The layer in its backward, or the logits."""
    reserve_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.working_bytes
            + self.reserve_bytes
        )


def usable_bytes(device: DeviceConstants, constants: LayoutConstants) -> float:
    """Bytes that a process can have on a device."""
    return device.memory_bytes * constants.visible_memory


def rank_memory(job: FixedLengthJob, layout: Layout, constants: LayoutConstants) -> RankMemory:
    """Memory of the fullest stage; the formulas are those of the module.

    Raises ConfigurationError for a kernel that is not known and replicas that do not use all ranks,
    StrategyError for more stages than layers.
    """
    stages = (_stage(job, layout, constants, stage) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total_bytes)


def _stage(
    job: FixedLengthJob, layout: Layout, constants: LayoutConstants, stage: int
) -> RankMemory:
    shape = job.shape
    num_layers = layout.scheme.layers_per_stage(shape.num_layers)[stage]
    is_last = stage == layout.pp - 1
    num_ends = int(stage == 0) + int(is_last)
    if layout.pp == 1 and shape.tied_embeddings:
        num_ends = 1
    num_parameters = (
        num_layers * shape.num_parameters_per_layer + num_ends * shape.num_embedding_parameters
    ) / layout.tp
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    whole = num_tokens * _layer_bytes_per_token(job, layout, constants)
    kept, at_work = whole, constants.working_layers * whole
    if layout.recomputes_layers:
        kept = num_tokens * shape.hidden_size * _BF16_BYTES / layout.num_shares_of_hidden()
        at_work += whole
    if is_last:
        logit_bytes = constants.logit_bytes_split / layout.tp + constants.logit_bytes_whole
        at_work = max(at_work, num_tokens * shape.vocab_size * logit_bytes)
    num_in_flight = min(layout.num_micro_batches(job), layout.pp - stage)
    return RankMemory(
        stage=stage,
        weights_bytes=_ROLE_BYTES * num_parameters,
        optimizer_bytes=_OPTIMIZER_BYTES * num_parameters / layout.dp(job),
        activations_bytes=num_layers * num_in_flight * kept * constants.fragmentation,
        working_bytes=at_work * constants.fragmentation,
        reserve_bytes=constants.reserve_bytes,
    )


def _layer_bytes_per_token(
    job: FixedLengthJob, layout: Layout, constants: LayoutConstants
) -> float:
    shape, kernel = job.shape, constants.kernel(layout.kernel)
    norm_states = 0.0 if kernel.has_norm_kernel else constants.norm_states_kept
    hidden = (constants.hidden_states_kept + norm_states) * shape.hidden_size
    states = constants.attention_states_kept + kernel.copied_hidden_states
    key_value_size = shape.num_query_groups * shape.kv_channels
    attention = states * 2 * (shape.query_size + key_value_size) / _ATTENTION_STATES
    num_matrices = _GATED_MATRICES if shape.gated_mlp else _GATED_MATRICES - 1
    rows = constants.ffn_states_kept * num_matrices / _GATED_MATRICES * shape.ffn_hidden_size
    scores = kernel.score_bytes * job.sequence_tokens * shape.num_attention_heads
    split = _BF16_BYTES * (attention + rows) + scores
    return _BF16_BYTES * hidden / layout.num_shares_of_hidden() + split / layout.tp
