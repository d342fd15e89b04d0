"""What layers keep of a token for their backward, and what attention needs besides."""

from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.cost_model.context import Way, choose_way
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.trained_model import Recompute, TrainedModel
from megatron.hydraulis.strategy import Scheme

# Per token and expert: a place (int64) and a choice (bool).
_ROUTING_BYTES_PER_EXPERT = 8 + 1
# Per token and expert that it passes: the expert's number and the token's place (int64), two
# weights (fp32).
_ROUTING_BYTES_PER_CHOICE = 2 * 8 + 2 * FP32_BYTES
# Mean and inverse deviation of a norm; one of them for RMSNorm.
_NORM_BYTES = 2 * FP32_BYTES
OFFSET_CHANNELS = 8
"""Channels that carry a learnable offset through the kernel: CUDA's take a multiple of 8."""
QUERY_BLOCK = 512
"""Queries that attend at once where they need masks, in tokens: the height of a block's mask. On
average a block computes half its height of keys too many per query."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Memory of layers under one scheme, in bytes per token of a micro-batch on a cp rank.

    A layer keeps, in elements (h hidden, q queries, k keys or values, f width of the MLP): 4h,
    inputs and outputs of both norms; q + 2k, rotated queries and keys and a copy of the values,
    which frees the fused output of the linear layer unless norms of queries and keys keep it; q,
    attention's output, and an fp32 number per head; 2f and f, the output of fc1 and the input of
    fc2 (f and f without a gate). An all-to-all over cp ranks keeps q more, the output before it is
    sent back, and keys and values once per copy of the heads.

    Latent attention keeps the latents of the rank's part of the row, and has heads of one size, the
    larger of those of keys and values, except in Transformer Engine's core attention.

    Experts keep a copy of a token's hidden state for each of them that it passes, and of that copy
    what an MLP keeps. Routing keeps the places of tokens sorted by expert, and scores. Which
    experts tokens choose does not matter to ranks that hold a part of each.

    Between its two products an adapter keeps as many channels as its rank. Frozen matrices without
    adapters keep no input, and the model's first layer nothing before its first adapter.

    Layers of Transformer Engine keep the same, but norms of queries and keys keep copies of these,
    not the fused output; so do local ones in fp32.

    Full recompute keeps the inputs of the recomputed chunks and all of one chunk. Selective
    recompute of the MLP keeps its inside for one layer only, that of norms and of the activation of
    experts their outputs; that of core attention keeps the linear layer's output and, with grouped
    queries, a copy of the queries, so it saves nothing.
    """

    model: TrainedModel
    scheme: Scheme
    is_frozen: bool = False

    @cached_property
    def recompute(self) -> Recompute:
        """Which activations the backward computes again."""
        return self.model.recompute_of(self.scheme)

    def keeps_input(self, module: str) -> bool:
        """See `TrainedModel.keeps_input`; those of trained layers do."""
        return not self.is_frozen or self.model.keeps_input(module)

    @cached_property
    def hidden(self) -> float:
        """A hidden state."""
        return float(self.model.shape.hidden_size * self.model.parameter_bytes)

    @cached_property
    def hidden_part(self) -> float:
        """A rank's part of a hidden state that sequence parallelism spreads over the tp ranks."""
        return self.hidden / self.num_shares

    @cached_property
    def query(self) -> float:
        """All queries of a rank."""
        shape = self.model.shape
        return self._of_rank(shape.num_attention_heads * shape.padded_channels)

    @cached_property
    def key(self) -> float:
        """All keys of a rank; values take as much."""
        shape = self.model.shape
        return self._of_rank(shape.num_query_groups * shape.padded_channels)

    @cached_property
    def mlp(self) -> float:
        """A tensor as wide as an MLP: half of fc1's output if that is gated."""
        return self._of_rank(self.model.shape.ffn_hidden_size)

    def _of_rank(self, num_channels: int) -> float:
        return num_channels * self.model.parameter_bytes / self.scheme.tp

    @property
    def num_shares(self) -> int:
        """Ranks over which hidden states are spread."""
        return self.scheme.tp if self.model.sequence_parallel else 1

    @cached_property
    def has_grouped_queries(self) -> bool:
        return self.key < self.query

    def kept_by(self, num_layers: int, *, are_first: bool) -> float:
        """What so many layers keep that are not fully recomputed; are_first: of the model."""
        model, kept = self.model, 0.0  # of a layer, besides all that it has
        number = self._num_with_experts(num_layers, are_first=are_first) / max(num_layers, 1)
        kept -= number * self._discarded_by_experts
        if self.recompute.drops("layernorm"):
            of_dense, with_experts = model.num_norms_apart
            kept -= ((1 - number) * of_dense + number * with_experts) * self.hidden_part
        if self.recompute.drops("mlp"):
            kept -= self.kept_by_mlp
            if model.has_te_layers:  # the norm before it is a part of its first matrix
                kept -= self.hidden_part
        if self.recompute.drops("core_attn"):
            kept += self._given_to_attention
            kept += 0.0 if model.pads_values else self.query * model.value_share  # its output
            if model.fuses_rope:  # before what is recomputed
                kept += self.query + self.key
                if self.has_grouped_queries and not model.norms_heads:
                    kept -= self.query  # their copy
            elif model.norms_heads:
                kept += self.query + self.key
            if model.norms_copy:  # also the queries, which would be copied otherwise
                kept += self._normed
                kept -= self.query if self.has_grouped_queries else 0.0
            kept -= self._kept_by_attention
        return self.whole(num_layers, are_first=are_first) + num_layers * kept

    def again(self, num_layers: int) -> float:
        """What is recomputed for the backward of the last layer of so many, besides what was
        kept."""
        recompute = self.recompute
        if recompute.num_layers_again(num_layers) == num_layers:
            # The chunk's input was kept, its output is recomputed.
            return self.whole(recompute.num_layers_at_once(num_layers))
        norms = max(self.model.num_norms_apart) * recompute.drops("layernorm") * self.hidden_part
        if not recompute.drops("mlp"):
            return norms + self._discarded_by_experts
        num_outputs = 2 if self.model.has_te_layers else 1  # of the MLP, and of the norm in it
        return norms + self.kept_by_mlp + num_outputs * self.hidden_part

    def whole(self, num_layers: int, *, are_first: bool = False) -> float:
        """What so many layers keep without recompute."""
        model, shape = self.model, self.model.shape
        num_states = 2 + 2 * model.widening
        num_states += self.keeps_input("linear_qkv") + self.keeps_input("linear_fc1")
        kept = num_states * self.hidden_part + 2 * _NORM_BYTES / self.num_shares
        kept += self._kept_by_attention
        if shape.kv_lora_rank:  # latents, before and after their norms
            num_channels = shape.qk_pos_emb_head_dim
            num_channels += (shape.q_lora_rank + shape.kv_lora_rank) * (1 + model.qk_norms)
            kept += num_channels * model.parameter_bytes / self.num_shares
            if model.pads_values:  # the output without the padding
                kept += self._of_rank(shape.output_size)
        if shape.output_gate:  # its sigmoid, in fp32, and the product with attention's output
            kept += self.query * (FP32_BYTES / model.parameter_bytes + 1)
        if model.lora is not None:
            kinds = (model.adapters_of_layer(has_experts=each) for each in model.kinds_of_layers)
            kept += model.lora.rank * max(map(len, kinds)) * model.parameter_bytes
        spared = self._kept_before_adapters if are_first else 0.0
        return num_layers * kept - spared + self.kept_by_mlps(num_layers, are_first=are_first)

    @property
    def _kept_before_adapters(self) -> float:
        """What others than the model's first layer keep before their first adapter: that has no
        gradient there, unless something is recomputed."""
        model = self.model
        if model.lora is None or self.recompute.granularity:
            return 0.0
        norm = (1 + model.widening) * self.hidden_part + _NORM_BYTES / self.num_shares
        if model.keeps_input("linear_qkv"):
            return norm
        kept = norm + self._kept_by_attention
        if model.keeps_input("linear_proj"):
            return kept - self.query * model.value_share
        kept += norm
        if model.keeps_input("linear_fc1"):
            return kept
        return kept + self.kept_by_mlp - model.keeps_input("linear_fc2") * self.mlp

    @cached_property
    def kept_by_mlp(self) -> float:
        """What an MLP keeps."""
        num_tensors = self.model.num_inside_tensors - (not self.keeps_input("linear_fc2"))
        return num_tensors * self.mlp

    @cached_property
    def _kept_by_experts(self) -> float:
        """What the experts of a layer keep, and the router."""
        shape = self.model.shape
        inside = self.model.num_expert_tensors * self._routed_width
        shared_width = shape.shared_expert_ffn_hidden_size / self.scheme.tp
        inside += self.model.num_inside_tensors * shared_width
        inside *= self.model.parameter_bytes
        scores = self.model.num_score_tensors * FP32_BYTES
        routing = (_ROUTING_BYTES_PER_EXPERT + scores) * shape.num_experts
        routing += _ROUTING_BYTES_PER_CHOICE * shape.experts_per_token
        return inside + self.copies + routing / self.num_shares

    @property
    def _routed_width(self) -> float:
        """Columns of routed experts that a token passes on a rank."""
        width = self.model.num_copies(self.scheme) * self.model.shape.expert_ffn_hidden_size
        return width if self.scheme.ep > 1 else width / self.scheme.tp

    @property
    def _discarded_by_experts(self) -> float:
        """What recomputed activations of a layer's experts do not keep: all but fc1's output."""
        model = self.model
        if not self.recompute.drops("moe_act"):
            return 0.0
        num_tensors = model.num_expert_tensors - (2 if model.shape.gated_mlp else 1)
        return num_tensors * self._routed_width * model.parameter_bytes

    def _num_with_experts(self, num_layers: int, *, are_first: bool) -> int:
        """Layers with experts among so many, such that most is kept."""
        return self.model.shape.num_with_experts(
            num_layers, are_first=are_first, most=self._kept_by_experts > self.kept_by_mlp
        )

    def kept_by_mlps(self, num_layers: int, *, are_first: bool = False) -> float:
        """What the MLPs and experts of so many layers keep at most; are_first: of the model."""
        number = self._num_with_experts(num_layers, are_first=are_first)
        return number * self._kept_by_experts + (num_layers - number) * self.kept_by_mlp

    def kept_by_last_mlp(self, num_layers: int, *, are_first: bool) -> float:
        """What is among that of the MLP or experts of the last of so many layers of a stage."""
        num_again = self.recompute.num_layers_again(num_layers)
        if num_again == num_layers:
            num_kept = self.recompute.num_layers_at_once(num_layers)
        else:
            num_kept = num_layers - num_again
        are_first &= not num_again
        others = self.kept_by_mlps(num_kept - 1, are_first=are_first)
        return self.kept_by_mlps(num_kept, are_first=are_first) - others

    @cached_property
    def copies(self) -> float:
        """A hidden state for each expert that a token passes."""
        return self.model.num_copies(self.scheme) * self.hidden

    @cached_property
    def outputs_of_experts(self) -> float:
        """Hidden states that exist when experts have run, besides their inputs, which layers keep:
        see "outputs of experts" above."""
        model, scheme = self.model, self.scheme
        copies, own = model.num_copies(scheme), model.shape.experts_per_token / scheme.tp
        # The precision in which tp ranks add up outputs, over that of the model.
        width = max(1.0, model.router_bytes / model.parameter_bytes)
        if 1 < scheme.ep == model.shape.num_experts:
            number = copies + 2 * own
        elif scheme.ep > 1:
            number = 3 * copies + own
        elif scheme.tp == 1:
            number = 3 * copies
        else:
            in_wide = 0.0
            if width > 1.0:  # the outputs again, and their flat copy and its sum
                in_wide = width * copies + (width - 1) * (copies + own)
            number = 3 * copies + 2 * own + in_wide
        return self.hidden * number

    @cached_property
    def _per_head(self) -> float:
        """An fp32 number."""
        return FP32_BYTES * self.model.shape.num_attention_heads / self.scheme.tp

    @cached_property
    def _kept_by_attention(self) -> float:
        model = self.model
        output = self.query * model.value_share
        kept = self._attended + output + self._per_head
        if model.softmax_type != "vanilla":  # the kernel's queries and output have more channels
            kept += self.query * (1 + 2 * self._channels_per_channel)
        elif model.precision is Precision.FP32:  # outputs of blocks, before they are joined
            kept += self.query * model.shape.num_windowed_layers / model.shape.num_layers
        if model.norms_copy:
            kept += self._normed
        elif model.norms_heads:  # their inputs keep the linear layer's output, and the values in it
            kept += self._given_to_attention + 2 * self._per_head
            kept -= self.key if self.scheme.cp == 1 else 0.0
        sends_back = self._exchanges_heads and not model.pads_values
        return kept + output if sends_back else kept

    @cached_property
    def _normed(self) -> float:
        """What norms of queries and keys keep if they copy."""
        return (1 + self.model.widening) * (self.query + self.key) + 2 * self._per_head

    @cached_property
    def _channels_per_channel(self) -> float:
        """Channels of a learnable offset, for each of a head."""
        is_learnable = self.model.softmax_type == "learnable"
        return OFFSET_CHANNELS / self.model.shape.kv_channels if is_learnable else 0.0

    @cached_property
    def _attended(self) -> float:
        """Queries, keys and values as the kernel receives them."""
        num_copies = 1.0
        if self._exchanges_heads:
            num_ranks = self.scheme.cp * self.scheme.tp
            num_copies = max(1.0, num_ranks / self.model.shape.num_query_groups)
        return self.query + (1 + self.model.value_share) * self.key * num_copies

    @cached_property
    def _given_to_attention(self) -> float:
        """The linear layer's output, and a copy of the queries if they are not contiguous in it."""
        shape = self.model.shape
        gate = self.query if shape.output_gate else 0.0
        values = self.key * shape.value_channels / shape.padded_channels
        copy = self.query if self.has_grouped_queries else 0.0
        return self.query + gate + self.key + values + copy

    @cached_property
    def needed_by_attention(self) -> float:
        """What exists in the backward of core attention, besides what the layer keeps of it.

        The kernel: gradients of the output, as received and contiguous, of queries, keys and
        values, an fp32 sum for queries and, with grouped queries, gradients of keys and values per
        head. Over cp ranks the keys are those of the row up to the end of each rank's second chunk,
        cp + ½ per local token; they are gathered again, and their gradients exist both apart and
        concatenated.
        """
        model, again = self.model, 0.0
        if self.recompute.drops("core_attn"):
            again = self._kept_by_attention + self.query
        if model.has_te_attention and self.scheme.cp > 1:
            return again + self._needed_by_te_exchange
        keys = self._attended if self._exchanges_heads else 2 * self.key * self.keys_at_once
        kernel = 3 * self.query
        if model.softmax_type == "vanilla":
            kernel += self._attention_sums
        else:  # sums of a block of queries, see `QUERY_BLOCK`
            # Each block of queries with a window has its keys behind an offset's key.
            num_copies = 1 + model.shape.window_tokens / QUERY_BLOCK
            keys *= (1 + self._channels_per_channel) * num_copies
        is_laid_out = self.scheme.cp > 1 or model.softmax_type != "vanilla"
        gathered = keys if is_laid_out else 0.0
        return again + gathered + keys + max(kernel, keys)

    @cached_property
    def _needed_by_te_exchange(self) -> float:
        """`needed_by_attention` by Transformer Engine over cp ranks.

        A ring has two buffers with keys, values and gradients of both, and the gradients of a step.
        Gathered keys and values exist besides gradients of two steps and their sums, at the end
        also in the order of ranks. An all-to-all sends gradients from one copy to another.
        """
        sums, keys = self._attention_sums, 2 * self.key * self.keys_at_once
        if self._exchanges_heads:
            return self.query + self._attended + max(sums, 3 * self._attended)
        if self._rings:
            return 5 * keys + 3 * self.query + sums
        return 4 * keys + 4 * self.query + max(sums, keys / 2)

    @cached_property
    def stream(self) -> float:
        """Freed by a ring's second stream, on which every second step runs, and not available to
        others: a step's output, and keys and values."""
        return self.query + 2 * self.key if self._rings else 0.0

    @cached_property
    def _attention_sums(self) -> float:
        """What the kernel adds up: gradients of queries in fp32 and, with grouped queries, of keys
        and values of the row per head, in fp32 by cuDNN."""
        fp32 = self.query * FP32_BYTES / self.model.parameter_bytes
        if not self.has_grouped_queries:
            return fp32
        per_head = fp32 if self.model.has_te_attention else self.query
        return fp32 + 2 * self.keys_at_once * per_head

    @property
    def gradients_by_head(self) -> float:
        """Gradients of keys that torch adds up after the kernel, in bf16."""
        model = self.model
        is_bf16 = model.precision is Precision.BF16 and not model.has_te_attention
        adds_up = self.has_grouped_queries and is_bf16 and model.softmax_type == "vanilla"
        return self.keys_at_once * self.query if adds_up else 0.0

    @cached_property
    def rounded(self) -> tuple[float, int]:
        """What cuDNN's sums take for a token, and how many ranks' tokens its rows have: at most as
        much again is for tokens that rows do not have."""
        fp32 = self.query * FP32_BYTES / self.model.parameter_bytes
        sums, cp = 3 * fp32 if self.has_grouped_queries else fp32, self.scheme.cp
        if cp == 1 or self._rings:
            return sums, 1
        return sums if self._exchanges_heads else sums * cp, cp

    @cached_property
    def keys_at_once(self) -> float:
        """Keys to which a kernel attends, for each local token."""
        cp = self.scheme.cp
        if cp == 1 or self._exchanges_heads or self._rings:
            return 1.0
        return cp if self.model.has_te_attention else cp + 0.5

    @property
    def _rings(self) -> bool:
        """Whether cp ranks pass keys and values on, and attend to those of one rank at a time."""
        return self._way == "p2p"

    @property
    def _exchanges_heads(self) -> bool:
        """Whether cp ranks exchange tokens for heads."""
        return self._way == "a2a"

    @cached_property
    def _way(self) -> Way | None:
        cp, tp, model = self.scheme.cp, self.scheme.tp, self.model
        if cp == 1:
            return None
        num_heads, num_groups = model.shape.num_attention_heads, model.shape.num_query_groups
        return choose_way(
            model.cp_comm_type,
            num_heads // tp,
            num_groups // tp,
            cp,
            has_te=model.has_te_attention,
            tp=tp,
            has_windows=model.shape.window is not None,
        )
