"""A model on a device and how it is trained: what its time and its memory depend on."""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron.hydraulis.cost_model.device import DeviceConstants, Precision
from megatron.hydraulis.cost_model.experts import MOST_SCORE_TENSORS
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.model_shape import ModelShape

CoreAttentionName = Literal["te", "torch", "sdpa"]
"""Kernel of core attention, the best first: Transformer Engine's, torch's ``varlen_attn``, and
``scaled_dot_product_attention`` sequence by sequence. Its class is in runtime/core_attention.py."""
CORE_ATTENTIONS: tuple[CoreAttentionName, ...] = get_args(CoreAttentionName)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """What says nothing of time affects memory only."""

    shape: ModelShape
    device: DeviceConstants
    precision: Precision = Precision.BF16
    """Of parameters and activations."""
    sequence_parallel: bool = True
    recompute: Recompute = NO_RECOMPUTE
    """Which activations the backward computes again, in time and memory."""
    cp_comm_type: str = "p2p"
    """How cp ranks exchange keys and values, one of `context.CP_COMM_TYPES`; time and memory."""
    qk_norms: bool = False
    """Whether queries and keys are normalised, or their latents."""
    num_gate_tensors: int = 0
    """What several kernels keep of a gated MLP, in tensors as wide as it; 0 if one is fused."""
    softmax_type: str = "vanilla"
    """Of core attention, as in Megatron."""
    has_wide_norms: bool = False
    """Whether norms keep their inputs in fp32, as local ones around one do."""
    has_te_layers: bool = False
    """Whether layers are those of Transformer Engine, in bf16."""
    groups_experts: bool = False
    """Whether a layer's experts are grouped products of Transformer Engine; time and memory."""
    fuses_rope: bool = False
    """Whether queries and keys are rotated by Transformer Engine's kernel."""
    has_te_attention: bool = False
    """Whether core attention is that of Transformer Engine, by cuDNN in bf16."""
    pool: PoolFootprint | None = None
    """Of the job; None assumes that the scheme in question fills the job."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at the same time; None for the default."""
    router_bytes: int = 0
    """Bytes of a router's score, in whose precision tp ranks add up the outputs of experts; 0 for
    that of parameters."""
    num_score_tensors: int = MOST_SCORE_TENSORS
    """What a router keeps of scores, in fp32 tensors of all experts."""
    has_optimizer: bool = True
    """Whether the job trains; otherwise there are no gradients and moments."""

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter and of an activation."""
        return self.precision.num_bytes

    @property
    def pads_values(self) -> bool:
        """Whether the kernel gets padded values, and its output is copied without the padding."""
        return not self.has_te_attention and self.shape.value_channels < self.shape.padded_channels

    @property
    def value_share(self) -> float:
        """Channels of values, as the kernel gets them, over those of the larger of both."""
        shape = self.shape
        return shape.value_channels / shape.padded_channels if self.has_te_attention else 1.0

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised, not the latents they come from."""
        return self.qk_norms and not self.shape.kv_lora_rank

    @property
    def norms_copy(self) -> bool:
        """Whether norms of queries and keys keep copies of their inputs, not of a larger tensor."""
        return self.norms_heads and (self.has_te_layers or self.widening > 0)

    @property
    def widening(self) -> float:
        """What norms keep of their inputs in fp32, more than in the model's precision."""
        return FP32_BYTES / self.parameter_bytes - 1 if self.has_wide_norms else 0.0

    @property
    def num_inside_tensors(self) -> int:
        """As wide as an MLP, that it keeps: the output of fc1 and the input of fc2."""
        return self.num_gate_tensors or (3 if self.shape.gated_mlp else 2)
