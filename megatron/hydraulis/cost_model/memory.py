"""Memory of a rank, and the most tokens of a micro-batch that fits in it.

Between iterations a tensor-parallel rank holds its *state* (`state_bytes`):

- its parameters in the training precision and their gradients in fp32; of those that it shares with
  other cp ranks (``fs``) its share, and slots where they are whole while they are used: weights of
  a layer and each that is gathered ahead, of the embedding and of the output layer; gradients of
  two layers, and of embedding or output layer; and what it receives of a gradient;
- its canonical shard: fp32 master weights, two moments and the gradient over all ranks of the job;
- staging of transfers (`PoolFootprint`);
- workspaces of cuBLAS.

While micro-batches run, memory peaks at one of a few *moments* (`moments`), each linear in the
tokens of a micro-batch: the state, what min(v, pp - i) micro-batches in flight keep on stage i
(1F1B; v is assumed large), what micro-batches leave behind, and what exists only at that moment,
which is in or after the backward of the last layer:

- *loss* (last stage): the gathered hidden state, and fp32 logits of one chunk of tokens
  (runtime/token_loss.py);
- *output layer* (last stage): the gathered hidden state and its gradient, and of one chunk the
  gradient of the logits, in fp32 and in the training precision;
- *second matrix of the MLP*: gradients of the layer's output, in parts and gathered, of the
  matrix's input, and of the matrix;
- *activation of the MLP*: besides what it frees, the backward of a gated activation has four
  tensors as wide as the MLP, that of GeLU six, that of a separate gate two (of a product);
- *outputs of experts* (forward): their outputs, sorted by expert and by token, and inputs before
  they were sorted; over tp or ep also what the rank's own tokens take, before they are gathered or
  sent and, with experts cut by tp, after the reduce-scatter. A rank with one expert sorts nothing.
  The output of shared experts waits;
- *an expert*: as the activation of the MLP, for all tokens, which may choose the same expert, and
  gradients of the outputs of all experts; in grouped products, of all experts at the same time;
- *attention*: what the kernel and the exchange with cp ranks need, less the MLP's activations,
  which are freed by then.

What layers keep and what attention needs is in `LayerMemory`. Besides its layers a stage keeps
its output, the last one that of the final norm, and cosines and sines, which tp does not divide.
They are looked up in a table of fp32 angles, as long as the longest sequence of the row, at most
the row. It exists during the forward, up to the loss; full recompute keeps it for the backward.

With layers of Transformer Engine

- products use one more workspace and write weight gradients into the arena. For each shape of a
  weight there is one tensor as large, which they return to autograd and nobody reads;
- they gather into memory that is freed;
- in the backward of *the first matrix of the MLP* its gathered input, its gradient before the
  reduce-scatter and the scattered gradient exist together, with the gradient of its output.

Its core attention, by cuDNN, has the workspaces that cudnn-frontend asks for: fp32 gradients of
queries and, with grouped queries, of keys and values per head, for tokens that are rounded up. Its
ring attends to one rank's keys and values at a time.

The model was compared with what torch's allocator counts for roles of 1 to 70 billion parameters
(docs/results/memory.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.cost_model.context import (
    Way,
    choose_way,
)
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.staging import (
    NUM_GRADIENT_SLOTS,
    PoolFootprint,
    footprint_of_scheme,
)
from megatron.hydraulis.cost_model.trained_model import (
    SAFE_EXPERT_LOAD,
    Recompute,
    TrainedModel,
)
from megatron.hydraulis.strategy import Scheme

# Master weight, first moment, second moment, summed gradient: all fp32.
_CANONICAL_BYTES_PER_PARAMETER = 4 * FP32_BYTES
# cuBLAS takes 32 MiB on Hopper, 8 MiB before, for each of two threads: forward and backward.
_WORKSPACE_BYTES = 2 * 2**25
# Of Transformer Engine's products on Hopper, and streams of grouped ones (gemm.py in 2.20.2).
_TE_WORKSPACE_BYTES, _TE_STREAMS = 2**25 + 1024, 4
# Its fused attention rounds larger rows up to a multiple, smaller ones to a power of two from
# which it has one graph for all (fused_attn/utils.cu in 2.20.2).
_TE_ROUNDED_TOKENS, _TE_LEAST_TOKENS = 2**15, 2**10
# Torch adds up larger bf16 tensors by parts, in an fp32 buffer as large as the sums.
_INDEXED_BYTES = 2**31
# Token, label and position in int64, the mask in fp32.
_BATCH_BYTES_PER_TOKEN = 3 * 8 + FP32_BYTES
# Masks, indices and sums of the cross entropy: six int64, four fp32.
_LOSS_BYTES_PER_TOKEN = 6 * 8 + 4 * FP32_BYTES
# As wide as the MLP, in the backward of its activation, less the input of fc2, which is freed.
_GATED_ACTIVATION_TENSORS, _PLAIN_ACTIVATION_TENSORS, _SEPARATE_ACTIVATION_TENSORS = 4, 6, 2
LOSS_CHUNK_BYTES = 2**30
"""Size of the fp32 logits of a chunk on a rank. A chunk's products then take ten times as long as
adding to the weight's gradient once, or longer, with up to 128K columns on a rank."""
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


def loss_chunk_tokens(num_columns: int) -> int:
    """Tokens whose logits exist at the same time by default.

    Args:
        num_columns: logits of a token on a rank: the padded vocabulary over tp.
    """
    return max(1, LOSS_CHUNK_BYTES // (FP32_BYTES * num_columns))


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

    Layers of Transformer Engine keep the same, but norms of queries and keys keep copies of these,
    not the fused output; so do local ones in fp32.

    Full recompute keeps the inputs of the recomputed chunks and all of one chunk. Selective
    recompute of the MLP keeps its inside for one layer only, that of norms and of the activation of
    experts their outputs; that of core attention keeps the linear layer's output and, with grouped
    queries, a copy of the queries, so it saves nothing.
    """

    model: TrainedModel
    scheme: Scheme

    @cached_property
    def recompute(self) -> Recompute:
        """Which activations the backward computes again."""
        return self.model.recompute_of(self.scheme)

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
        num_states = 4 + 2 * model.widening
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
        return num_layers * kept + self.kept_by_mlps(num_layers, are_first=are_first)

    @cached_property
    def kept_by_mlp(self) -> float:
        """What an MLP keeps."""
        return self.model.num_inside_tensors * self.mlp

    @cached_property
    def _kept_by_experts(self) -> float:
        """What the experts of a layer keep, and the router."""
        shape = self.model.shape
        width = self._routed_width + shape.shared_expert_ffn_hidden_size / self.scheme.tp
        inside = self.model.num_inside_tensors * width * self.model.parameter_bytes
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
        num_tensors = model.num_inside_tensors - (2 if model.shape.gated_mlp else 1)
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


@dataclass(frozen=True, slots=True)
class Moment:
    """A point at which memory may peak while micro-batches run."""

    name: str
    fixed_bytes: float
    """Independent of the number of tokens."""
    bytes_per_token: float
    """Per token of a micro-batch on a cp rank."""
    bytes_per_chunk_token: float = 0.0
    """Per token of them in the chunk at work."""
    chunk_tokens: int = 0
    above_tokens: float = 0.0
    """Tokens on a cp rank up to which it does not occur."""

    def bytes_with(self, num_tokens: float) -> float:
        """Memory with a micro-batch of num_tokens on a cp rank."""
        if num_tokens <= self.above_tokens:
            return 0.0
        in_chunk = min(num_tokens, self.chunk_tokens)
        per_token = self.bytes_per_token * num_tokens
        return self.fixed_bytes + per_token + self.bytes_per_chunk_token * in_chunk

    def tokens_in(self, num_bytes: float, further_per_token: float) -> float:
        """Tokens on a cp rank that fit, each with further bytes."""
        free, per_token = num_bytes - self.fixed_bytes, self.bytes_per_token + further_per_token
        in_one_chunk = free / (per_token + self.bytes_per_chunk_token)
        if in_one_chunk <= self.chunk_tokens:
            return max(self.above_tokens, in_one_chunk)
        in_chunks = (free - self.bytes_per_chunk_token * self.chunk_tokens) / per_token
        return max(self.above_tokens, in_chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel(TrainedModel):
    """Memory of the ranks of one job."""

    num_ranks: int
    """Ranks of the job: the canonical shards are spread over all of them."""
    ranks_per_node: int | None = None
    """None if all ranks are in one node."""
    expert_load: float = SAFE_EXPERT_LOAD
    """Tokens of a layer's busiest expert over the mean of its experts."""

    @property
    def reserve_bytes(self) -> float:
        """Memory kept free of micro-batches: the device's reserve, and communicators that exceed
        it."""
        num_communicators = 0 if self.pool is None else self.pool.num_communicators
        return self.device.reserve_with(num_communicators)

    @property
    def usable_bytes(self) -> float:
        """Limit of the peak."""
        return self.device.memory_bytes - self.reserve_bytes

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch over all cp ranks, 0 if the model does not fit.

        A multiple of 2·tp·cp, to which rows are padded.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        return min(self.stage_tokens(scheme, stage, num) for stage, num in enumerate(layers))

    def stage_tokens(self, scheme: Scheme, stage: int, num_layers: int) -> int:
        """`max_tokens` of one stage with num_layers layers."""
        multiple = 2 * scheme.tp * scheme.cp
        usable, stream = self.usable_bytes, self._layer(scheme).stream
        tokens_per_cp_rank = min(
            moment.tokens_in(usable, stream) for moment in self.moments(scheme, stage, num_layers)
        )
        return max(0, int(tokens_per_cp_rank * scheme.cp) // multiple * multiple)

    def peak_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """Peak while micro-batches run that have num_tokens over all cp ranks."""
        return max(
            moment.bytes_with(num_tokens / scheme.cp) for moment in self.moments(scheme, stage)
        )

    def _num_layers(self, scheme: Scheme, stage: int) -> int:
        return scheme.layers_per_stage(self.shape.num_layers)[stage]

    def role_bytes(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """Parameters and gradients of a rank of a stage, with slots for those that it shares.

        num_layers: instead of the scheme's.
        """
        shape, num_layers = self.shape, num_layers or self._num_layers(scheme, stage)
        is_first, is_last = stage == 0, stage == scheme.pp - 1
        num_embeddings = int(is_first)
        # With one stage, tied embeddings are one matrix.
        if is_last and not (shape.tied_embeddings and is_first):
            num_embeddings += 1
        num_parameters = self.num_layer_parameters(
            scheme, num_layers, are_first=is_first, as_share=True
        )
        embedding = shape.num_embedding_parameters / scheme.tp
        final_norm = is_last * shape.hidden_size
        num_parameters += (num_embeddings * embedding + final_norm) / scheme.fs
        gradient_bytes = self.has_optimizer * FP32_BYTES
        num_bytes = num_parameters * (self.parameter_bytes + gradient_bytes)
        if not scheme.shares_weights:
            return num_bytes
        layer = max(
            sum(self.gathered_parameters(scheme, has_experts=has_experts))
            for has_experts in self.kinds_of_layers
        )
        weights = (1 + self.fs_prefetch) * layer + num_embeddings * embedding + final_norm
        # Gradients of embedding and output layer take turns.
        gradients = NUM_GRADIENT_SLOTS * layer + embedding + final_norm
        if (wire_bytes := self.footprint(scheme).gradient_bytes) == FP32_BYTES:
            received = max(layer, embedding) / scheme.fs
        else:  # also what is sent, in that precision
            received = 2 * max(layer, embedding) * wire_bytes / FP32_BYTES
        return num_bytes + weights * self.parameter_bytes + (gradients + received) * gradient_bytes

    def activation_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """What micro-batches in flight keep for their backward, of num_tokens over all cp ranks."""
        kept = self._kept_per_token(scheme, stage, self._num_layers(scheme, stage))
        return (scheme.pp - stage) * kept * num_tokens / scheme.cp

    def state_bytes(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """What a rank of a stage holds between iterations; num_layers as for `role_bytes`."""
        shape, role = self.shape, self.role_bytes(scheme, stage, num_layers)
        per_parameter = _CANONICAL_BYTES_PER_PARAMETER if self.has_optimizer else FP32_BYTES
        canonical = per_parameter * shape.num_parameters / self.num_ranks
        footprint = self.footprint(scheme)
        products: float = _WORKSPACE_BYTES
        if self.has_te_layers:
            shares, of_expert = footprint.weight_shapes, 1 / max(shape.num_experts, 1)
            of_expert *= max(0.0, 1 - shares * shape.experts_per_token)  # ep leaves it whole
            num_entries = shares * shape.num_matrix_parameters_per_layer
            num_entries += of_expert * shape.num_routed_entries
            workspaces = _TE_WORKSPACE_BYTES * (1 + _TE_STREAMS * self.groups_experts)
            products += workspaces + num_entries * self.parameter_bytes
        staging = footprint.staging_bytes(shape.num_parameters_per_layer, self.parameter_bytes)
        return role + canonical + staging + products

    def footprint(self, scheme: Scheme) -> PoolFootprint:
        """The footprint of the job's pool, or of a job that the scheme fills."""
        ranks_per_node = self.ranks_per_node or self.num_ranks
        return self.pool or footprint_of_scheme(
            scheme, self.shape, self.num_ranks, ranks_per_node, self.gradient_bytes
        )

    def moments(
        self, scheme: Scheme, stage: int, num_layers: int | None = None
    ) -> Iterator[Moment]:
        """The points at which memory of a rank of a stage may peak; num_layers as for `role_bytes`.

        Each has a list of what is alive, in bytes per token; what was freed is negative.
        """
        num_layers = num_layers or self._num_layers(scheme, stage)
        shape, layer = self.shape, self._layer(scheme)
        is_last = stage == scheme.pp - 1
        state = self.state_bytes(scheme, stage, num_layers)
        whole = layer.hidden if layer.num_shares > 1 else 0.0
        in_flight = (scheme.pp - stage) * self._kept_per_token(scheme, stage, num_layers)
        received = 2 * layer.hidden_part if stage > 0 else 0.0  # with its gradient
        gathered = 0.0 if self.has_te_layers else whole  # the buffer
        always = (in_flight, received, gathered)
        final_norm = 0.0
        if is_last:
            final_norm = (2 + self.widening) * layer.hidden_part
            num_again = self.recompute_of(scheme).num_layers_again(num_layers)
            is_kept = self.fuses_rope or num_again > 0
            table = 0.0 if is_kept else self._rotary_table_per_token(scheme)
            with_loss = (*always, whole, _LOSS_BYTES_PER_TOKEN)
            num_columns = shape.vocab_size // scheme.tp
            chunk_tokens = self.loss_chunk_tokens or loss_chunk_tokens(num_columns)
            logits = num_columns * FP32_BYTES
            yield Moment("loss", state, sum((*with_loss, table)), logits, chunk_tokens)
            if self.parameter_bytes < FP32_BYTES:
                logits += num_columns * self.parameter_bytes
            alive = sum((*with_loss, layer.hidden))
            yield Moment("output layer", state, alive, logits, chunk_tokens)
        # In or after the backward of the last layer.
        in_layer = (*always, -final_norm, layer.again(num_layers), layer.hidden_part)
        num_tensors = _GATED_ACTIVATION_TENSORS if shape.gated_mlp else _PLAIN_ACTIVATION_TENSORS
        num_tensors = _SEPARATE_ACTIVATION_TENSORS if self.num_gate_tensors else num_tensors
        if shape.num_experts:
            # A forward has no gradient, a recompute no output yet. Before the last stage, the
            # schedule holds the gradient received last during the next forward.
            gradient = layer.hidden_part if is_last else 0.0
            shared = layer.hidden_part if shape.shared_expert_ffn_hidden_size else 0.0
            alive = sum((*in_layer, layer.outputs_of_experts, -gradient, shared))
            yield Moment("outputs of experts", state, alive)
            share = 1 / scheme.tp if scheme.ep == 1 else 1
            expert = shape.expert_ffn_hidden_size * share * self.parameter_bytes
            is_one = scheme.ep == 1 and not self.groups_experts
            chosen = expert * (1 if is_one else self.num_copies(scheme))
            weight = 0.0 if self.has_te_layers else shape.hidden_size * expert
            alive = sum((*in_layer, layer.copies, num_tensors * chosen))
            yield Moment("an expert", state + weight, alive)
        if shape.num_expert_layers < shape.num_layers:
            weight = 0.0 if self.has_te_layers else shape.hidden_size * layer.mlp
            second = sum((*in_layer, whole, layer.mlp))
            yield Moment("second matrix of the MLP", state + weight, second)
            activation = sum((*in_layer, num_tensors * layer.mlp))
            yield Moment("activation of the MLP", state, activation)
        if self.has_te_layers:
            # The gradient of its output is all that is left of the inside.
            of_output = (2 if shape.gated_mlp else 1) * layer.mlp
            inputs = 2 * whole + layer.hidden_part
            first = sum((*in_layer, -layer.kept_by_mlp, of_output, inputs))
            yield Moment("first matrix of the MLP", state, first)
        last_mlp = layer.kept_by_last_mlp(num_layers, are_first=stage == 0) + 2 * layer.hidden_part
        attention = sum((*in_layer, -last_mlp, layer.needed_by_attention))
        if self.has_te_attention:
            rounded, num_rows = layer.rounded
            state += rounded / num_rows * _TE_LEAST_TOKENS
            yield Moment("attention", state, attention, rounded, _TE_ROUNDED_TOKENS // num_rows)
            return
        yield Moment("attention", state, attention)
        if layer.gradients_by_head:
            above = _INDEXED_BYTES / layer.gradients_by_head
            sums = layer.keys_at_once * layer.key * FP32_BYTES / self.parameter_bytes
            yield Moment("attention to many keys", state, attention + sums, above_tokens=above)

    def _layer(self, scheme: Scheme) -> LayerMemory:
        return LayerMemory(model=self, scheme=scheme)

    def _kept_per_token(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        """What one micro-batch keeps on a stage."""
        recompute, layer = self.recompute_of(scheme), self._layer(scheme)
        num_again = recompute.num_layers_again(num_layers)
        layers = recompute.num_inputs_kept(num_layers) * layer.hidden_part
        layers += layer.kept_by(num_layers - num_again, are_first=stage == 0 and not num_again)
        # In fp32, norms keep a copy of the stage's first input and of the last stage's output.
        num_outputs = 2 if stage == scheme.pp - 1 else 1
        outputs = num_outputs * (1 + self.widening) * layer.hidden_part
        rotation: float = 2 * self.shape.rotary_channels * self.parameter_bytes
        if self.fuses_rope:
            rotation = self._rotary_table_per_token(scheme)
        elif num_again:
            rotation += self._rotary_table_per_token(scheme)
        return layers + outputs + rotation + _BATCH_BYTES_PER_TOKEN

    def _rotary_table_per_token(self, scheme: Scheme) -> float:
        """Angles of all positions of the row, which all of its cp ranks hold."""
        return float(scheme.cp * self.shape.rotary_channels * FP32_BYTES)
