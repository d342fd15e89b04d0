"""A model on a device and how it is trained: what its time and its memory depend on."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron.hydraulis.cost_model.device import DeviceConstants, Precision
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen, StageLayers
from megatron.hydraulis.lora import Adapter, Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

CoreAttentionName = Literal["te", "torch", "sdpa"]
"""Kernel of core attention, the best first: Transformer Engine's, torch's ``varlen_attn``, and
``scaled_dot_product_attention`` sequence by sequence. Its class is in runtime/core_attention.py."""
CORE_ATTENTIONS: tuple[CoreAttentionName, ...] = get_args(CoreAttentionName)
EXPERT_LOAD = 1.5
"""Tokens of a layer's busiest expert over the mean of its experts, where no profile has measured
it: an assumption. The log of a run has its own."""
SAFE_EXPERT_LOAD = 2.6
"""Least that limits of memory allow for. Logs of runs had 1.8 to 2.6; a profile measures random
tokens on fresh routers, whose loads are nearly equal, so it must not lower the limit's load."""
MOST_SCORE_TENSORS = 4
"""What a router may keep of scores, in fp32 tensors of all experts: those by which it chooses
(sigmoid, or softmax before the choice), two of the balancing loss and one of the z-loss."""
SELECTIVE_MODULES = ("core_attn", "mlp", "layernorm", "moe_act")
"""Modules that selective recompute can name."""
_KEPT_MODULES = ("moe", "shared_experts", "mla_up_proj", "gdn_norm_out")
"""Modules of upstream's selective recompute that are not recomputed here."""
_KEPT_TEXT = "its activations are kept, which takes more memory"


def kept_modules(*, has_experts: bool, has_te_layers: bool, groups_experts: bool) -> dict[str, str]:
    """Modules that keep their activations though selective recompute names them, with what the user
    reads.

    Upstream recomputes the MLPs of layers without experts, but here all layers keep the same
    modules. What it recomputes in order to discard an output alone (``CheckpointWithoutOutput``,
    megatron-core 0.19.2) needs Transformer Engine, the activation of experts grouped products.
    """
    kept = dict.fromkeys(_KEPT_MODULES, _KEPT_TEXT)
    if has_experts:
        kept["mlp"] = f"{_KEPT_TEXT}, as layers have experts"
    if not has_te_layers:
        kept["layernorm"] = f"{_KEPT_TEXT}; only layers of Transformer Engine recompute norms"
    if not has_experts:
        kept["moe_act"] = "without effect, as there are no experts"
    elif not groups_experts:
        kept["moe_act"] = (
            f"{_KEPT_TEXT}; only --moe-grouped-gemm with layers of Transformer Engine recomputes it"
        )
    return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Which activations the backward recomputes; none by default.

    The settings and their meaning are upstream's (megatron-core 0.19.2, ``recompute.py``,
    ``transformer_layer.py`` and ``attention.py``):

    - ``full``, ``uniform``: a stage is cut into chunks of num_layers layers (the last may be
      shorter); the input of each is kept, and the chunk's forward runs again before its backward.
    - ``full``, ``block``: the same for the first num_layers layers of a stage, one by one; the
      others keep everything.
    - ``selective``: recomputes the named modules of every layer, ``core_attn`` (scores and their
      product with the values), ``mlp``, ``layernorm`` (norms that no product contains) and
      ``moe_act`` (the activation inside routed experts); their inputs are kept.

    Raises ConfigurationError for full recompute without method or number of layers, and for
    selective recompute of no modules or of any outside SELECTIVE_MODULES.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    """How full recompute chooses layers."""
    num_layers: int = 0
    """Layers of a chunk (uniform), or recomputed layers of a stage (block), in full recompute."""
    modules: tuple[str, ...] = ()
    """What selective recompute recomputes."""

    def __post_init__(self) -> None:
        if self.granularity == "full" and (self.method is None or self.num_layers < 1):
            raise ConfigurationError(
                f"full recompute needs a method and a number of layers of at least 1 but has "
                f"{self.method} and {self.num_layers}; give --recompute-method uniform or block, "
                f"and --recompute-num-layers"
            )
        if self.granularity == "selective" and (
            not self.modules or not set(self.modules) <= set(SELECTIVE_MODULES)
        ):
            raise ConfigurationError(
                f"selective recompute is of some of {', '.join(SELECTIVE_MODULES)} but names "
                f"{', '.join(self.modules) or 'none'}; give --recompute-modules of these"
            )

    def __str__(self) -> str:
        parts = (self.granularity, self.method, self.num_layers or None, *self.modules)
        return " ".join(str(part) for part in parts if part is not None) or "none"

    def without(self, kept: tuple[str, ...]) -> "Recompute":
        """The same, if these modules keep their activations."""
        if self.granularity != "selective":
            return self
        modules = tuple(module for module in self.modules if module not in kept)
        return replace(self, modules=modules) if modules else NO_RECOMPUTE

    def num_layers_again(self, num_layers: int) -> int:
        """Layers of a stage of num_layers that are fully recomputed."""
        if self.granularity != "full":
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def num_inputs_kept(self, num_layers: int) -> int:
        """Hidden states that full recompute keeps of a micro-batch on a stage."""
        num_again = self.num_layers_again(num_layers)
        if self.method == "uniform" and num_again:
            return math.ceil(num_again / self.num_layers)
        return num_again

    def num_layers_at_once(self, num_layers: int) -> int:
        """Layers whose activations exist again while one chunk runs backward."""
        num_again = self.num_layers_again(num_layers)
        return min(self.num_layers, num_again) if self.method == "uniform" else min(1, num_again)

    def drops(self, module: str) -> bool:
        """True if the activations of one of SELECTIVE_MODULES are recomputed alone."""
        return self.granularity == "selective" and module in self.modules


EVERY_LAYER = Recompute(granularity="full", method="uniform", num_layers=1)
NO_RECOMPUTE = Recompute()
"""All activations are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """What says nothing of time affects memory only."""

    shape: ModelShape
    device: DeviceConstants
    precision: Precision = Precision.BF16
    """Type of parameters and activations."""
    sequence_parallel: bool = True
    recompute: Recompute = NO_RECOMPUTE
    """Which activations the backward computes again, in time and memory, in schemes without ``r``:
    see `recompute_of`."""
    cp_comm_type: str = "p2p"
    """How cp ranks exchange keys and values, one of `context.CP_COMM_TYPES`; time and memory."""
    qk_norms: bool = False
    """Whether queries and keys are normalised, or their latents."""
    num_gate_tensors: int = 0
    """What several kernels keep of a gated MLP, in tensors as wide as it; 0 if one is fused."""
    softmax_type: str = "vanilla"
    """Softmax of core attention, as in Megatron."""
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
    """What the job's pool needs; None assumes that the scheme in question fills the job."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at the same time; None for the default."""
    router_bytes: int = 0
    """Size of a router's score, in whose precision tp ranks add up the outputs of experts; 0 for
    that of parameters."""
    num_score_tensors: int = MOST_SCORE_TENSORS
    """What a router keeps of scores, in fp32 tensors of all experts."""
    expert_load: float = EXPERT_LOAD
    """Tokens of a layer's busiest expert over the mean of its experts."""
    has_optimizer: bool = True
    """Whether the job trains; otherwise there are no gradients and moments."""
    gradient_bytes: int = FP32_BYTES
    """Size of a gradient on the wire."""
    accumulates: bool = False
    """Whether gradients of several calls are added up on the shards before an update, in memory of
    their own."""
    offer_recompute: bool = False
    """True to offer schemes with ``r`` where they hold more tokens; it has no other effect."""
    fs_prefetch: int = 1
    """Layers whose shared weights are gathered before they are used; time and memory."""
    frozen: Frozen = NOTHING_FROZEN
    """The parts that are not trained, and adapters; time and memory."""

    @property
    def parameter_bytes(self) -> int:
        """Size of a parameter and of an activation."""
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
    def num_norms_apart(self) -> tuple[int, int]:
        """Norms of hidden states that no product contains, of a layer without and with experts."""
        before_attention = int(not self.has_te_layers or self.shape.kv_lora_rank > 0)
        return before_attention + (not self.has_te_layers), before_attention + 1

    @property
    def num_inside_tensors(self) -> int:
        """Tensors as wide as an MLP that it keeps: the output of fc1 and the input of fc2."""
        return self.num_gate_tensors or (3 if self.shape.gated_mlp else 2)

    @property
    def num_expert_tensors(self) -> int:
        """Likewise of a routed expert, whose output a kernel of its own weighs if the gate has
        several."""
        return self.num_inside_tensors + (self.num_gate_tensors > 0)

    def recompute_of(self, scheme: Scheme) -> Recompute:
        """Which activations the backward of a scheme computes again."""
        return EVERY_LAYER if scheme.recomputes else self.recompute

    def rank_load(self, scheme: Scheme) -> float:
        """Tokens of the busiest ep rank over the mean of the ranks; 1 without ep.

        Loads of experts are assumed to be independent, so that the excess of n experts together is
        1/√n of that of one.
        """
        if scheme.ep == 1:
            return 1.0
        return 1.0 + (self.expert_load - 1.0) / math.sqrt(self.shape.num_experts / scheme.ep)

    def num_copies(self, scheme: Scheme) -> float:
        """Experts that a token passes on the busiest rank, for every token of its cp rank.

        Without ep, tp cuts every expert like an MLP: a rank works for all tokens of the tp ranks.
        With ep it has whole experts and works for the tokens that choose them.
        """
        if scheme.ep == 1:
            return self.shape.experts_per_token
        return self.rank_load(scheme) * self.shape.experts_per_token / scheme.tp

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained; None without any."""
        return self.frozen.lora

    def stage_layers(self, scheme: Scheme, stage: int) -> StageLayers:
        """The layers of a stage by their backward; that of a later stage goes through all of them.

        With recomputation the first stage's do, unless it is frozen altogether: recomputed modules
        need an input with a gradient (runtime/strategy_runtime.py).
        """
        numbers = scheme.layers_per_stage(self.shape.num_layers)
        start = sum(numbers[:stage])
        found = self.frozen.among(range(start, start + numbers[stage]))
        if stage == scheme.pp - 1:
            found = found._replace(trained=found.trained + self.shape.num_predictions)
        is_frozen = found.idle == found.number and (stage < scheme.pp - 1 or self.frozen.output)
        if self.recompute_of(scheme).granularity is None or is_frozen:
            return found
        return StageLayers(found.trained, found.frozen + found.idle)

    def usual_layers(self, num_layers: int) -> StageLayers:
        """So many layers of any stage, as if what a model provider freezes was trained."""
        return StageLayers(num_layers) if self.lora is None else StageLayers(0, num_layers)

    @property
    def num_trained(self) -> int:
        """Parameters of the whole model that are trained; of layers with and without experts, at
        most."""
        shape, frozen = self.shape, self.frozen
        if self.lora is not None:
            return self.lora.num_parameters(shape)
        number = shape.num_parameters_of_layers(shape.num_layers - len(frozen.layers))
        number += shape.num_predictions * shape.num_prediction_parameters
        number += (not frozen.embedding) * shape.num_embedding_parameters
        if not frozen.output:
            number += shape.hidden_size
            number += (not shape.tied_embeddings) * shape.num_embedding_parameters
        return number

    @property
    def num_frozen(self) -> int:
        """Parameters of the whole model that are not."""
        num_parameters = self.shape.num_parameters
        return num_parameters - self.num_trained if self.lora is None else num_parameters

    def adapters_of_layer(self, *, has_experts: bool) -> list[Adapter]:
        """The adapters of a layer."""
        return [] if self.lora is None else self.lora.of_layer(self.shape, has_experts=has_experts)

    def adapted_linears(self, *, has_experts: bool) -> list[list[Adapter]]:
        """The adapters of a layer by Megatron's linear layers, which apply theirs together."""
        adapters = self.adapters_of_layer(has_experts=has_experts)
        by_module = itertools.groupby(adapters, key=lambda each: each.module)
        return [list(group) for _, group in by_module]

    def keeps_input(self, module: str) -> bool:
        """Whether a linear layer, such as ``linear_qkv``, of a frozen layer keeps its input for the
        backward, which one without adapters does not need; true where that was not measured: with
        experts, latents, a gate of several kernels or Transformer Engine."""
        shape = self.shape
        others = (shape.num_experts, shape.kv_lora_rank, self.num_gate_tensors, self.has_te_layers)
        adapters = self.adapters_of_layer(has_experts=False)
        return any(others) or any(each.module.endswith(module) for each in adapters)

    def num_adapter_parameters(
        self, num_layers: int, *, are_first: bool = False, has_output: bool = False
    ) -> int:
        """Parameters of the adapters of so many layers, all of which each tp rank has whole.

        are_first: as below; has_output: whether that of the output layer counts, too.
        """
        if self.lora is None:
            return 0
        of_mlp, of_experts, of_output = map(
            self.lora.num_in,
            (
                self.adapters_of_layer(has_experts=False),
                self.adapters_of_layer(has_experts=True),
                self.lora.of_output(self.shape),
            ),
        )
        number = self.shape.num_with_experts(
            num_layers, are_first=are_first, most=of_experts > of_mlp
        )
        return number * of_experts + (num_layers - number) * of_mlp + has_output * of_output

    def num_layer_parameters(
        self, scheme: Scheme, num_layers: int, *, are_first: bool = False
    ) -> float:
        """Parameters of so many layers on a rank when they are used, without adapters; are_first:
        of the model."""
        shape = self.shape
        num_with_experts = shape.num_with_experts(num_layers, are_first=are_first)
        routed = num_with_experts * shape.num_routed_entries
        whole = num_layers * (2 * shape.hidden_size + shape.num_whole_attention_entries)
        whole += num_with_experts * shape.num_router_entries
        others = shape.num_parameters_of_layers(num_layers, are_first=are_first) - routed - whole
        num_routed = routed / (scheme.tp if scheme.ep == 1 else scheme.ep)
        return whole + others / scheme.tp + num_routed

    def shared_parameters(self, scheme: Scheme, *, has_experts: bool) -> dict[int, float]:
        """Parameters of a layer that a rank gathers to use it, by the number of ranks that share
        them: whole experts may have fewer."""
        shape, num_whole = self.shape, self.shape.num_whole_attention_entries
        cut, whole = shape.num_attention_entries - num_whole, num_whole + 2 * shape.hidden_size
        if not has_experts:
            return {scheme.fs: whole + (cut + shape.num_mlp_entries) / scheme.tp}
        router, routed = shape.num_router_entries, shape.num_routed_entries
        cut += shape.num_expert_entries - router - routed
        gathered = {scheme.fs: whole + router + cut / scheme.tp}
        if scheme.num_holders > 1:
            of_experts = routed / (scheme.tp if scheme.ep == 1 else scheme.ep)
            gathered[scheme.num_holders] = gathered.get(scheme.num_holders, 0.0) + of_experts
        return gathered

    @property
    def kinds_of_layers(self) -> dict[bool, int]:
        """Number of layers with and without experts, where there are some."""
        shape = self.shape
        kinds = {True: shape.num_expert_layers, False: shape.num_layers - shape.num_expert_layers}
        return {has_experts: number for has_experts, number in kinds.items() if number}
