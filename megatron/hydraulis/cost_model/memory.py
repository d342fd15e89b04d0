"""Memory of a rank, and the most tokens of a micro-batch that fits in it.

Between iterations a tensor-parallel rank holds its *state* (`state_bytes`):

- its parameters in the training precision and their gradients in fp32;
- its canonical shard: fp32 master weights, two moments and the gradient over all ranks of the job;
- staging of transfers (`PoolFootprint`);
- workspaces of cuBLAS.

While micro-batches run, memory peaks at one of a few *moments* (`moments`), each linear in the
tokens of a micro-batch: the state, what min(v, pp - i) micro-batches in flight keep on stage i
(1F1B; v is assumed large), what micro-batches leave behind (`_left_per_token`), and what exists
only at that moment, which is in or after the backward of the last layer:

- *loss* (last stage): the gathered hidden state, and fp32 logits of one chunk of tokens
  (runtime/token_log_probs.py);
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

A layer keeps per token, in elements (h hidden, q queries, k keys or values, f width of the MLP):
4h, inputs and outputs of both norms; q + 2k, rotated queries and keys and a copy of the values,
which frees the fused output of the linear layer unless norms of queries and keys keep it; q,
attention's output, and an fp32 number per head; 2f and f, the output of fc1 and the input of fc2 (f
and f without a gate). An all-to-all over cp ranks keeps q more, the output before it is sent back,
and keys and values once per copy of the heads. Besides its layers a stage keeps its output, the
last one that of the final norm, and cosines and sines, which tp does not divide. They are looked up
in a table of fp32 angles, as long as the longest sequence of the row, at most the row. It exists
during the forward, up to the loss; full recompute keeps it for the backward.

Latent attention keeps the latents of the rank's part of the row, and has heads of one size, the
larger of those of keys and values, except in Transformer Engine's core attention.

Experts keep a copy of a token's hidden state for each of them that it passes, and of that copy what
an MLP keeps. Routing keeps the places of tokens sorted by expert, and scores. Which experts tokens
choose does not matter to ranks that hold a part of each.

Layers of Transformer Engine keep the same, but

- their products use one more workspace and write weight gradients into the arena. For each shape of
  a weight there is one tensor as large, which they return to autograd and nobody reads;
- they gather into memory that is freed;
- in the backward of *the first matrix of the MLP* its gathered input, its gradient before the
  reduce-scatter and the scattered gradient exist together, with the gradient of its output;
- norms of queries and keys keep copies of these, not the fused output; so do local ones in fp32.

Its core attention, by cuDNN, has the workspaces that cudnn-frontend asks for: fp32 gradients of
queries and, with grouped queries, of keys and values per head, for tokens that are rounded up. Its
ring attends to one rank's keys and values at a time.

Full recompute keeps the inputs of the recomputed chunks and all of one chunk. Selective recompute
of the MLP keeps its inside for one layer only; that of core attention keeps the linear layer's
output and, with grouped queries, a copy of the queries, so it saves nothing.

Other software than this program has one moment, with what a layer in its backward and the logits
take together, and keeps more (`KeptMemory`).

The model was compared with what torch's allocator counts for roles of 1 to 70 billion parameters
(docs/results/memory.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.hydraulis.cost_model.context import (
    choose_way,
    takes_all_to_all,
    te_all_to_all_refusal,
)
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.experts import (
    MOST_SCORE_TENSORS,
    SAFE_EXPERT_LOAD,
    copies_at_once,
    num_copies,
    num_layer_parameters,
    routing_bytes,
)
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.software import KeptMemory
from megatron.hydraulis.cost_model.staging import PoolFootprint, footprint_of_scheme
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

# Master weight, first moment, second moment, summed gradient: all fp32.
_CANONICAL_BYTES_PER_PARAMETER = 4 * FP32_BYTES
_OPTIMIZER_BYTES_PER_PARAMETER = 3 * FP32_BYTES  # without the summed gradient
# cuBLAS takes 32 MiB on Hopper, 8 MiB before, for each of two threads: forward and backward.
_WORKSPACE_BYTES = 2 * 2**25
# Of Transformer Engine's products on Hopper, and streams of grouped ones (gemm.py in 2.20.2).
_TE_WORKSPACE_BYTES, _TE_STREAMS = 2**25 + 1024, 4
# Its fused attention rounds larger rows up to a multiple, smaller ones to a power of two from
# which it has one graph for all (fused_attn/utils.cu in 2.20.2).
_TE_ROUNDED_TOKENS, _TE_LEAST_TOKENS = 2**15, 2**10
# Mean and inverse deviation of a norm; one of them for RMSNorm.
_NORM_BYTES_PER_TOKEN = 2 * FP32_BYTES
# Token, label and position in int64, the mask in fp32.
_BATCH_BYTES_PER_TOKEN = 3 * 8 + FP32_BYTES
# Masks, indices and sums of the cross entropy: six int64, four fp32.
_LOSS_BYTES_PER_TOKEN = 6 * 8 + 4 * FP32_BYTES
# As wide as the MLP, in the backward of its activation, less the input of fc2, which is freed.
_GATED_ACTIVATION_TENSORS, _PLAIN_ACTIVATION_TENSORS, _SEPARATE_ACTIVATION_TENSORS = 4, 6, 2
LOSS_CHUNK_BYTES = 2**30
"""Of the fp32 logits of a chunk on a rank. A chunk's products then take ten times as long as adding
to the weight's gradient once, or longer, with up to 128K columns on a rank."""
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

    def bytes_with(self, num_tokens: float) -> float:
        """With a micro-batch of num_tokens on a cp rank."""
        in_chunk = min(num_tokens, self.chunk_tokens)
        per_token = self.bytes_per_token * num_tokens
        return self.fixed_bytes + per_token + self.bytes_per_chunk_token * in_chunk

    def tokens_in(self, num_bytes: float, further_per_token: float) -> float:
        """Tokens on a cp rank that fit, each with further bytes."""
        free, per_token = num_bytes - self.fixed_bytes, self.bytes_per_token + further_per_token
        in_one_chunk = free / (per_token + self.bytes_per_chunk_token)
        if in_one_chunk <= self.chunk_tokens:
            return in_one_chunk
        return (free - self.bytes_per_chunk_token * self.chunk_tokens) / per_token


@dataclass(frozen=True, slots=True)
class _Token:
    """Bytes of a token on a rank, by tensor."""

    hidden: float
    hidden_part: float
    """A rank's part of a hidden state that sequence parallelism spreads over the tp ranks."""
    query: float
    key: float
    """Of all keys; values take as much."""
    mlp: float
    """A tensor as wide as an MLP: half of fc1's output if that is gated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model on a device and how it is trained, as far as costs depend on it.

    What says nothing of time affects memory only.
    """

    shape: ModelShape
    device: DeviceConstants
    parameter_bytes: int = 2
    """Bytes of a parameter and of an activation: 2 for bf16, 4 for fp32."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel(TrainedModel):
    """Memory of the ranks of one job."""

    num_ranks: int
    """Ranks of the job: the canonical shards are spread over all of them."""
    ranks_per_node: int | None = None
    """None if all ranks are in one node."""
    kept: KeptMemory | None = None
    """Of other software; None for this program."""
    sequence_tokens: int = 0
    """Of every sequence; affects other software that stores scores."""
    num_micro_batches: int | None = None
    """Of a replica in an iteration; None for many."""
    expert_load: float = SAFE_EXPERT_LOAD
    """Tokens of a layer's busiest expert over the mean of its experts."""

    @property
    def reserve_bytes(self) -> float:
        """Memory kept free of micro-batches: the device's reserve, and communicators that exceed
        it."""
        if self.kept is not None:
            return self.kept.reserve_bytes
        num_communicators = 0 if self.pool is None else self.pool.num_communicators
        return self.device.reserve_with(num_communicators)

    @property
    def usable_bytes(self) -> float:
        """Limit of the peak."""
        visible = 1.0 if self.kept is None else self.kept.visible_memory
        return visible * self.device.memory_bytes - self.reserve_bytes

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch over all cp ranks, 0 if the model does not fit.

        A multiple of 2·tp·cp, to which rows are padded.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        return min(self.stage_tokens(scheme, stage, num) for stage, num in enumerate(layers))

    def stage_tokens(self, scheme: Scheme, stage: int, num_layers: int) -> int:
        """`max_tokens` of one stage with num_layers layers."""
        multiple = 2 * scheme.tp * scheme.cp
        usable, stream = self.usable_bytes, self._stream_per_token(scheme)
        tokens_per_cp_rank = min(
            moment.tokens_in(usable, stream) for moment in self._moments(scheme, stage, num_layers)
        )
        return max(0, int(tokens_per_cp_rank * scheme.cp) // multiple * multiple)

    def state_bytes(self, scheme: Scheme, stage: int) -> float:
        """What a rank of a stage holds between iterations."""
        return self._state_bytes(scheme, stage, self._num_layers(scheme, stage))

    def peak_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """Peak while micro-batches run that have num_tokens over all cp ranks."""
        return max(
            moment.bytes_with(num_tokens / scheme.cp) for moment in self.moments(scheme, stage)
        )

    def stream_bytes(self, scheme: Scheme, num_tokens: int) -> float:
        """What the allocator holds besides tensors, for the stream of Transformer Engine's ring.

        Every second step runs on it, and other streams get none of its memory.
        """
        return self._stream_per_token(scheme) * num_tokens / scheme.cp

    def moments(self, scheme: Scheme, stage: int) -> tuple[Moment, ...]:
        """The points at which memory of a rank of a stage may peak."""
        return tuple(self._moments(scheme, stage, self._num_layers(scheme, stage)))

    def _num_layers(self, scheme: Scheme, stage: int) -> int:
        return scheme.layers_per_stage(self.shape.num_layers)[stage]

    def role_bytes(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """Parameters and gradients of a rank of a stage."""
        gradient_bytes = FP32_BYTES if self.kept is None else self.parameter_bytes
        num_parameters = self._num_parameters(scheme, stage, num_layers)
        return num_parameters * (self.parameter_bytes + self.has_optimizer * gradient_bytes)

    def activation_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """What micro-batches in flight keep for their backward, of num_tokens over all cp ranks."""
        num_layers, is_last = self._num_layers(scheme, stage), stage == scheme.pp - 1
        kept = self._kept_per_token(scheme, num_layers, is_last=is_last)
        return self._num_in_flight(scheme, stage) * kept * num_tokens / scheme.cp

    def _num_in_flight(self, scheme: Scheme, stage: int) -> int:
        return min(self.num_micro_batches or scheme.pp, scheme.pp - stage)

    def _num_parameters(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """Of a rank of a stage."""
        shape = self.shape
        num_layers = num_layers or self._num_layers(scheme, stage)
        is_first, is_last = stage == 0, stage == scheme.pp - 1
        num_embeddings = int(is_first)
        # With one stage, tied embeddings are one matrix.
        if is_last and not (shape.tied_embeddings and is_first):
            num_embeddings += 1
        num_parameters = num_layer_parameters(shape, scheme, num_layers)
        num_parameters += num_embeddings * shape.num_embedding_parameters / scheme.tp
        return num_parameters + is_last * shape.hidden_size

    def _state_bytes(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        shape, role = self.shape, self.role_bytes(scheme, stage, num_layers)
        if self.kept is not None:
            dp = self.num_ranks / scheme.num_ranks
            num_parameters = self._num_parameters(scheme, stage, num_layers)
            return role + _OPTIMIZER_BYTES_PER_PARAMETER * num_parameters / dp
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
        """Of the job's pool, or of a job that the scheme fills."""
        ranks_per_node = self.ranks_per_node or self.num_ranks
        return self.pool or footprint_of_scheme(scheme, self.shape, self.num_ranks, ranks_per_node)

    def _moments(self, scheme: Scheme, stage: int, num_layers: int) -> Iterator[Moment]:
        shape, token = self.shape, self._token(scheme)
        is_last = stage == scheme.pp - 1
        state = self._state_bytes(scheme, stage, num_layers)
        in_flight = self._num_in_flight(scheme, stage)
        kept = in_flight * self._kept_per_token(scheme, num_layers, is_last=is_last)
        if self.kept is not None:
            kept += self._again_per_token(scheme, num_layers) + token.hidden + token.mlp
            kept += self.kept.score_bytes * self._scores_per_token(scheme)
            logits = is_last * self.kept.logit_bytes * shape.vocab_size
            yield Moment("layer and logits", state, kept + logits)
            return
        kept += self._left_per_token(scheme, stage)
        matrix = shape.hidden_size * self.parameter_bytes / scheme.tp  # a column or row of one
        whole = token.hidden if self._spreads(scheme) else 0.0
        if is_last:
            is_kept = self.fuses_rope or self.recompute.num_layers_again(num_layers) > 0
            table = 0.0 if is_kept else self._rotary_table_per_token(scheme)
            with_loss = kept + whole + _LOSS_BYTES_PER_TOKEN
            num_columns = shape.vocab_size // scheme.tp
            chunk_tokens = self.loss_chunk_tokens or loss_chunk_tokens(num_columns)
            logits = num_columns * FP32_BYTES
            yield Moment("loss", state, with_loss + table, logits, chunk_tokens)
            if self.parameter_bytes < FP32_BYTES:
                logits += num_columns * self.parameter_bytes
            yield Moment("output layer", state, with_loss + token.hidden, logits, chunk_tokens)
            kept -= (2 + self._widening) * token.hidden_part  # the final norm's have been freed
        kept += self._again_per_token(scheme, num_layers) + token.hidden_part
        num_tensors = _GATED_ACTIVATION_TENSORS if shape.gated_mlp else _PLAIN_ACTIVATION_TENSORS
        num_tensors = _SEPARATE_ACTIVATION_TENSORS if self.num_gate_tensors else num_tensors
        if shape.num_experts:
            copies = self._copies_per_token(scheme)
            width = max(1.0, self.router_bytes / self.parameter_bytes)
            outputs = token.hidden * copies_at_once(shape, scheme, self.expert_load, width)
            if is_last and not shape.shared_expert_ffn_hidden_size:
                # A forward has no gradient, a recompute no output yet. Before the last stage, the
                # schedule holds the gradient received last during the next forward.
                outputs -= token.hidden_part
            yield Moment("outputs of experts", state, kept + outputs)
            share = 1 / scheme.tp if scheme.ep == 1 else 1
            expert = shape.expert_ffn_hidden_size * share * self.parameter_bytes
            gradient = 0.0 if self.has_te_layers else shape.hidden_size * expert
            is_one = scheme.ep == 1 and not self.groups_experts
            chosen = expert * (1 if is_one else self._num_copies(scheme))
            yield Moment("an expert", state + gradient, kept + copies + num_tensors * chosen)
        if shape.num_expert_layers < shape.num_layers:
            yield Moment(
                "second matrix of the MLP",
                state + (0.0 if self.has_te_layers else matrix * shape.ffn_hidden_size),
                kept + whole + token.mlp,
            )
            yield Moment("activation of the MLP", state, kept + num_tensors * token.mlp)
        if self.has_te_layers:
            # The gradient of its output is all that is left of the inside.
            gradients = (2 if shape.gated_mlp else 1) * token.mlp + 2 * whole + token.hidden_part
            inside = self._mlp_per_token(scheme)
            yield Moment("first matrix of the MLP", state, kept - inside + gradients)
        freed = self._mlps_per_token(scheme, 1) + 2 * token.hidden_part
        per_token = kept - freed + self._attention_per_token(scheme)
        if not self.has_te_attention:
            yield Moment("attention", state, per_token)
            return
        rounded, num_rows = self._rounded_per_token(scheme)
        state += rounded / num_rows * _TE_LEAST_TOKENS
        yield Moment("attention", state, per_token, rounded, _TE_ROUNDED_TOKENS // num_rows)

    def _token(self, scheme: Scheme) -> _Token:
        shape, tp = self.shape, scheme.tp
        hidden = float(shape.hidden_size * self.parameter_bytes)
        return _Token(
            hidden=hidden,
            hidden_part=hidden / (tp if self._spreads(scheme) else 1),
            query=shape.num_attention_heads * shape.padded_channels * self.parameter_bytes / tp,
            key=shape.num_query_groups * shape.padded_channels * self.parameter_bytes / tp,
            mlp=shape.ffn_hidden_size * self.parameter_bytes / tp,
        )

    def _spreads(self, scheme: Scheme) -> bool:
        """Whether hidden states are spread over the tp ranks."""
        return self.sequence_parallel and scheme.tp > 1

    def _left_per_token(self, scheme: Scheme, stage: int) -> float:
        """What a micro-batch leaves behind: the gather buffer of sequence parallelism and, after
        the first stage, what was received, with its gradient."""
        token = self._token(scheme)
        buffer = token.hidden if self._spreads(scheme) and not self.has_te_layers else 0.0
        return buffer + (2 * token.hidden_part if stage > 0 else 0.0)

    def _kept_per_token(self, scheme: Scheme, num_layers: int, *, is_last: bool) -> float:
        """What one micro-batch keeps on a stage."""
        recompute, token = self.recompute, self._token(scheme)
        num_again = recompute.num_layers_again(num_layers)
        layers = recompute.num_inputs_kept(num_layers) * token.hidden_part
        layers += self._layers_per_token(scheme, num_layers - num_again)
        # In fp32, norms keep a copy of the stage's first input and of the last stage's output.
        outputs = (2 if is_last else 1) * (1 + self._widening) * token.hidden_part
        rotation: float = 2 * self.shape.rotary_channels * self.parameter_bytes
        if self.fuses_rope:
            rotation = self._rotary_table_per_token(scheme)
        elif num_again:
            rotation += self._rotary_table_per_token(scheme)
        return layers + outputs + rotation + _BATCH_BYTES_PER_TOKEN

    def _rotary_table_per_token(self, scheme: Scheme) -> float:
        """Angles of all positions of the row, which all of its cp ranks hold."""
        return float(scheme.cp * self.shape.rotary_channels * FP32_BYTES)

    def _layers_per_token(self, scheme: Scheme, num_layers: int) -> float:
        """What so many layers keep that are not fully recomputed."""
        kept, token = 0.0, self._token(scheme)  # of a layer, besides all that it has
        if self.recompute.drops_mlp:
            kept -= self._mlp_per_token(scheme)
            if self.has_te_layers:  # the norm before it is a part of its first matrix
                kept -= token.hidden_part
        if self.recompute.drops_core_attention:
            kept += self._given_to_attention_per_token(scheme)
            kept += 0.0 if self._pads_values else token.query * self._value_share  # its output
            if self.fuses_rope:  # before what is recomputed
                kept += token.query + token.key
                if token.key < token.query and not self._norms_heads:
                    kept -= token.query  # their copy
            elif self._norms_heads:
                kept += token.query + token.key
            if self._norms_copy:  # also the queries, which would be copied otherwise
                kept += self._normed_per_token(scheme)
                kept -= token.query if token.key < token.query else 0.0
            kept -= self._kept_by_attention_per_token(scheme)
        return self._whole_layers_per_token(scheme, num_layers) + num_layers * kept

    def _whole_layers_per_token(self, scheme: Scheme, num_layers: int) -> float:
        shape, token = self.shape, self._token(scheme)
        shares = scheme.tp if self._spreads(scheme) else 1
        inputs = 2 * (1 + self._widening)
        norms = (2 + inputs) * token.hidden_part + 2 * _NORM_BYTES_PER_TOKEN / shares
        if self.kept is not None:
            norms += (self.kept.hidden_states + self.kept.norm_states) * token.hidden_part
            norms += self.kept.attention_states * (token.query + token.key) / 2
            norms += shape.gated_mlp * self.kept.mlp_tensors * token.mlp
            norms += self.kept.score_bytes * self._scores_per_token(scheme)
        kept = norms + self._kept_by_attention_per_token(scheme)
        if shape.kv_lora_rank:
            kept += self._latents_per_token(scheme)
        if shape.output_gate:  # its sigmoid, in fp32, and the product with attention's output
            kept += token.query * (FP32_BYTES / self.parameter_bytes + 1)
        return num_layers * kept + self._mlps_per_token(scheme, num_layers)

    def _latents_per_token(self, scheme: Scheme) -> float:
        """What latent attention keeps besides: latents, before and after their norms, and its
        output without the padding of values."""
        shape, num_shares = self.shape, scheme.tp if self._spreads(scheme) else 1
        num_channels = shape.qk_pos_emb_head_dim
        num_channels += (shape.q_lora_rank + shape.kv_lora_rank) * (1 + self.qk_norms)
        kept = num_channels * self.parameter_bytes / num_shares
        if self._pads_values:
            kept += shape.output_size * self.parameter_bytes / scheme.tp
        return kept

    @property
    def _pads_values(self) -> bool:
        """Whether the kernel gets padded values, and its output is copied without the padding."""
        return not self.has_te_attention and self.shape.value_channels < self.shape.padded_channels

    @property
    def _value_share(self) -> float:
        """Channels of values, as the kernel gets them, over those of the larger of both."""
        shape = self.shape
        return shape.value_channels / shape.padded_channels if self.has_te_attention else 1.0

    @property
    def _norms_heads(self) -> bool:
        """Whether queries and keys are normalised, not the latents they come from."""
        return self.qk_norms and not self.shape.kv_lora_rank

    @property
    def _widening(self) -> float:
        """What norms keep of their inputs in fp32, more than in the model's precision."""
        return FP32_BYTES / self.parameter_bytes - 1 if self.has_wide_norms else 0.0

    def _scores_per_token(self, scheme: Scheme) -> float:
        """Of a layer."""
        return self.sequence_tokens * self.shape.num_attention_heads / scheme.tp

    @property
    def _num_inside_tensors(self) -> int:
        """As wide as an MLP, that it keeps: the output of fc1 and the input of fc2."""
        return self.num_gate_tensors or (3 if self.shape.gated_mlp else 2)

    def _mlp_per_token(self, scheme: Scheme) -> float:
        """What an MLP keeps."""
        return self._num_inside_tensors * self._token(scheme).mlp

    def _experts_per_token(self, scheme: Scheme) -> float:
        """What the experts of a layer keep, and the router."""
        shape = self.shape
        routed = self._num_copies(scheme) * shape.expert_ffn_hidden_size
        if scheme.ep == 1:
            routed /= scheme.tp
        width = routed + shape.shared_expert_ffn_hidden_size / scheme.tp
        inside = self._num_inside_tensors * width * self.parameter_bytes
        routing = routing_bytes(shape, self.num_score_tensors)
        routing /= scheme.tp if self._spreads(scheme) else 1
        return inside + self._copies_per_token(scheme) + routing

    def _mlps_per_token(self, scheme: Scheme, num_layers: int) -> float:
        """What the MLPs and experts of so many layers keep, with as many of the larger kind among
        them as the model has."""
        num_with_experts = self.shape.num_expert_layers
        kinds = [(self._mlp_per_token(scheme), self.shape.num_layers - num_with_experts)]
        if num_with_experts:
            kinds.append((self._experts_per_token(scheme), num_with_experts))
        kept = 0.0
        for of_layer, number in sorted(kinds, reverse=True):
            kept += min(num_layers, number) * of_layer
            num_layers -= min(num_layers, number)
        return kept

    def _num_copies(self, scheme: Scheme) -> float:
        return num_copies(self.shape, scheme, self.expert_load)

    def _copies_per_token(self, scheme: Scheme) -> float:
        """A hidden state for each of them."""
        return self._num_copies(scheme) * self._token(scheme).hidden

    def _kept_by_attention_per_token(self, scheme: Scheme) -> float:
        token = self._token(scheme)
        per_head = FP32_BYTES * self.shape.num_attention_heads / scheme.tp
        kept = self._attended_per_token(scheme) + token.query * self._value_share + per_head
        if self.softmax_type != "vanilla":  # the kernel's queries and output have more channels
            kept += token.query * (1 + 2 * self._channels_per_channel)
        elif self.parameter_bytes == FP32_BYTES:  # outputs of blocks, before they are joined
            kept += token.query * self.shape.num_windowed_layers / self.shape.num_layers
        if self._norms_copy:
            kept += self._normed_per_token(scheme)
        elif self._norms_heads:  # their inputs keep the linear layer's output, and the values in it
            kept += self._given_to_attention_per_token(scheme) + 2 * per_head
            kept -= token.key if scheme.cp == 1 else 0.0
        sends_back = self._exchanges_heads(scheme) and not self._pads_values
        return kept + token.query * self._value_share if sends_back else kept

    @property
    def _norms_copy(self) -> bool:
        """Whether norms of queries and keys keep copies of their inputs, not of a larger tensor."""
        return self._norms_heads and (self.has_te_layers or self._widening > 0)

    def _normed_per_token(self, scheme: Scheme) -> float:
        """What norms of queries and keys keep if they copy."""
        token = self._token(scheme)
        per_head = FP32_BYTES * self.shape.num_attention_heads / scheme.tp
        return (1 + self._widening) * (token.query + token.key) + 2 * per_head

    @property
    def _channels_per_channel(self) -> float:
        """Channels of a learnable offset, for each of a head."""
        is_learnable = self.softmax_type == "learnable"
        return OFFSET_CHANNELS / self.shape.kv_channels if is_learnable else 0.0

    def _attended_per_token(self, scheme: Scheme) -> float:
        """Queries, keys and values as the kernel receives them."""
        token, num_copies = self._token(scheme), 1.0
        if self._exchanges_heads(scheme):
            num_copies = max(1.0, scheme.cp * scheme.tp / self.shape.num_query_groups)
        return token.query + (1 + self._value_share) * token.key * num_copies

    def _given_to_attention_per_token(self, scheme: Scheme) -> float:
        """The linear layer's output, and a copy of the queries if they are not contiguous in it."""
        token = self._token(scheme)
        is_grouped = token.key < token.query
        gate = token.query if self.shape.output_gate else 0.0
        values = token.key * self.shape.value_channels / self.shape.padded_channels
        return token.query + gate + token.key + values + (token.query if is_grouped else 0.0)

    def _again_per_token(self, scheme: Scheme, num_layers: int) -> float:
        """What is recomputed for the backward of the last layer, besides what was kept."""
        recompute, token = self.recompute, self._token(scheme)
        if recompute.num_layers_again(num_layers) == num_layers:
            # The chunk's input was kept, its output is recomputed.
            return self._whole_layers_per_token(scheme, recompute.num_layers_at_once(num_layers))
        if not recompute.drops_mlp:
            return 0.0
        num_outputs = 2 if self.has_te_layers else 1  # of the MLP, and of the norm in it
        return self._mlp_per_token(scheme) + num_outputs * token.hidden_part

    def _attention_per_token(self, scheme: Scheme) -> float:
        """Needed in the backward of core attention, besides what the layer keeps of it.

        The kernel: gradients of the output, as received and contiguous, of queries, keys and
        values, an fp32 sum for queries and, with grouped queries, gradients of keys and values per
        head. Over cp ranks the keys are those of the row up to the end of each rank's second chunk,
        cp + ½ per local token; they are gathered again, and their gradients exist both apart and
        concatenated.
        """
        again = 0.0
        token = self._token(scheme)
        if self.recompute.drops_core_attention:
            again = self._kept_by_attention_per_token(scheme) + token.query
        if self.has_te_attention and scheme.cp > 1:
            return again + self._te_exchange_per_token(scheme)
        if self._exchanges_heads(scheme):
            keys = self._attended_per_token(scheme)
        else:
            keys = 2 * token.key * self._keys_at_once(scheme)
        kernel = 3 * token.query
        if self.softmax_type == "vanilla":
            kernel += self._attention_sums_per_token(scheme)
        else:  # sums of a block of queries, see `QUERY_BLOCK`
            # Each block of queries with a window has its keys behind an offset's key.
            num_copies = 1 + self.shape.window_tokens / QUERY_BLOCK
            keys *= (1 + self._channels_per_channel) * num_copies
        is_laid_out = scheme.cp > 1 or self.softmax_type != "vanilla"
        gathered = keys if is_laid_out else 0.0
        return again + gathered + keys + max(kernel, keys)

    def _te_exchange_per_token(self, scheme: Scheme) -> float:
        """As `_attention_per_token`, by Transformer Engine over cp ranks.

        A ring has two buffers with keys, values and gradients of both, and the gradients of a step.
        Gathered keys and values exist besides gradients of two steps and their sums, at the end
        also in the order of ranks. An all-to-all sends gradients from one copy to another.
        """
        token, sums = self._token(scheme), self._attention_sums_per_token(scheme)
        if self._exchanges_heads(scheme):
            gradients = self._attended_per_token(scheme)
            return token.query + gradients + max(sums, 3 * gradients)
        keys = 2 * token.key * self._keys_at_once(scheme)
        if self._rings(scheme):
            return 5 * keys + 3 * token.query + sums
        return 4 * keys + 4 * token.query + max(sums, keys / 2)

    def _stream_per_token(self, scheme: Scheme) -> float:
        """A step's output, and keys and values."""
        token = self._token(scheme)
        return token.query + 2 * token.key if self._rings(scheme) else 0.0

    def _attention_sums_per_token(self, scheme: Scheme) -> float:
        """What the kernel adds up: gradients of queries in fp32 and, with grouped queries, of keys
        and values of the row per head, in fp32 by cuDNN."""
        token = self._token(scheme)
        fp32 = token.query * FP32_BYTES / self.parameter_bytes
        if token.key == token.query:
            return fp32
        per_head = fp32 if self.has_te_attention else token.query
        return fp32 + 2 * self._keys_at_once(scheme) * per_head

    def _rounded_per_token(self, scheme: Scheme) -> tuple[float, int]:
        """What cuDNN's sums take for a token, and how many ranks' tokens its rows have: at most as
        much again is for tokens that rows do not have."""
        token = self._token(scheme)
        fp32 = token.query * FP32_BYTES / self.parameter_bytes
        sums = fp32 if token.key == token.query else 3 * fp32
        if scheme.cp == 1 or self._rings(scheme):
            return sums, 1
        return sums if self._exchanges_heads(scheme) else sums * scheme.cp, scheme.cp

    def _keys_at_once(self, scheme: Scheme) -> float:
        """To which a kernel attends, for each local token."""
        if scheme.cp == 1 or self._exchanges_heads(scheme) or self._rings(scheme):
            return 1.0
        return scheme.cp if self.has_te_attention else scheme.cp + 0.5

    def _rings(self, scheme: Scheme) -> bool:
        """Whether cp ranks pass keys and values on, and attend to those of one rank at a time."""
        is_asked = self.has_te_attention and self.cp_comm_type != "all_gather"
        return scheme.cp > 1 and is_asked and not self._exchanges_heads(scheme)

    def _exchanges_heads(self, scheme: Scheme) -> bool:
        """Whether cp ranks exchange tokens for heads."""
        if scheme.cp == 1:
            return False
        num_heads = self.shape.num_attention_heads // scheme.tp
        num_groups = self.shape.num_query_groups // scheme.tp
        if self.has_te_attention:
            refusal = te_all_to_all_refusal(num_heads, num_groups, scheme.cp)
            return takes_all_to_all(self.cp_comm_type, num_heads, num_groups, scheme.cp, refusal)
        return choose_way(self.cp_comm_type, num_heads, num_groups, scheme.cp) == "a2a"
