"""Memory of a rank, and from it the most tokens a micro-batch may hold.

What a rank holds between iterations, its *state* (`state_bytes`), all per tensor-parallel rank:

- its parameters in the training precision and their gradients in fp32;
- its canonical shard: fp32 master weights, two moments and the gradient over all ranks of the job;
- staging: two slots, each with a buffer of what is sent and one of what is received of the largest
  bucket, which is a layer. An owner sends parameters and receives fp32 gradients, as many copies of
  its share as there are holders; a role receives and sends in the arena itself or, where the order
  of travel is another, the layer over tp. Where transfers are relayed inside a node, a third
  buffer holds what passes through (`pool_footprint`);
- workspaces of cuBLAS.

While micro-batches run, memory peaks at one of a few *moments* (`moments`), each a line over the
tokens of a micro-batch: the state, what min(v, pp - i) micro-batches in flight keep on stage i
(1F1B; v is taken as large), what micro-batches leave behind (`_left_per_token`), and what is there
at that moment alone, always in the backward of the last layer or behind it:

- *loss* (last stage): logits, and the fp32 copy in which the cross entropy works; in fp32 it works
  in the logits themselves;
- *output layer* (last stage): the logits' gradient, that of the hidden state, whole and in parts,
  and of the matrix;
- *second matrix of the MLP*: gradients of the layer's output, in parts and gathered, of the
  matrix's input, and of the matrix;
- *activation of the MLP*: with its kernels not compiled into one, a gated activation's backward has
  four tensors as wide as the MLP beside what it frees, GeLU's six;
- *attention*: what the kernel and the exchange with cp ranks need, less the MLP's activations,
  which are gone by then.

Kept by a layer, per token, in elements (h hidden, q queries, k keys or values, f width of the MLP):
4h, inputs and outputs of both norms; q + 2k, queries and keys turned and a copy of the values, so
that the fused output of the linear layer can be freed, which norms of queries and keys keep; q,
attention's output, and an fp32 number a head; 2f and f, the output of fc1 and the input of fc2 (f
and f without a gate). An all-to-all over cp ranks keeps q more, the output before it goes back, and
keys and values as often as heads are copied. Beside its layers a stage keeps its output, the last
one that of the final norm, and cosines and sines, which no tp divides.

Full recompute keeps the inputs of the recomputed chunks, and one chunk is there whole. Selective
recompute of the MLP keeps what is inside it of one layer only; that of core attention keeps what
the linear layer gave, with grouped queries a copy of the queries too, so that it saves nothing.

All of it was compared with what torch's allocator counts for roles of 1 to 70 billion parameters
(docs/planning.md, section Memory).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.hydraulis.cost_model.context_ways import choose_way
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.pool_footprint import PoolFootprint
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

__all__ = ["MemoryModel", "Moment"]

_FP32_BYTES = 4
# Master weight, first moment, second moment, summed gradient: all fp32.
_CANONICAL_BYTES_PER_PARAMETER = 4 * _FP32_BYTES
_NUM_STAGING_SLOTS = 2
# cuBLAS takes 32 MiB on Hopper, 8 MiB before, for each of two threads: forward and backward.
_WORKSPACE_BYTES = 2 * 2**25
# Mean and inverse deviation of a norm; one of them for RMSNorm.
_NORM_BYTES_PER_TOKEN = 2 * _FP32_BYTES
# Token, label and position in int64, the mask in fp32.
_BATCH_BYTES_PER_TOKEN = 3 * 8 + _FP32_BYTES
# Masks, indices and sums of the cross entropy: six int64, four fp32.
_LOSS_BYTES_PER_TOKEN = 6 * 8 + 4 * _FP32_BYTES
# As wide as the MLP, in the backward of its activation, less the input of fc2, which is freed.
_GATED_ACTIVATION_TENSORS = 4
_PLAIN_ACTIVATION_TENSORS = 6


@dataclass(frozen=True, slots=True)
class Moment:
    """When memory may peak while micro-batches run."""

    name: str
    fixed_bytes: float
    """Whatever the number of tokens."""
    bytes_per_token: float
    """For every token of a micro-batch on a cp rank."""


@dataclass(frozen=True, slots=True)
class _Token:
    """Bytes of a token on a rank, by the tensors that it is part of."""

    hidden: float
    hidden_part: float
    """Of a hidden state that sequence parallelism spreads over the tp ranks."""
    query: float
    key: float
    """As many are a value."""
    mlp: float
    """As wide as the MLP, one half of fc1's output if that is gated."""
    logits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Memory of the ranks of one job."""

    shape: ModelShape
    device: DeviceConstants
    num_ranks: int
    """Ranks of the job: the canonical shards are spread over all of them."""
    parameter_bytes: int
    """Bytes of a parameter and of an activation: 2 for bf16, 4 for fp32."""
    sequence_parallel: bool = True
    recompute: Recompute = NO_RECOMPUTE
    """Which activations the backward computes again."""
    cp_comm_type: str = "p2p"
    """How cp ranks exchange keys and values, one of `context_ways.CP_COMM_TYPES`."""
    qk_norms: bool = False
    """Whether queries and keys pass through norms of their own."""
    ranks_per_node: int | None = None
    """None where all ranks are in one node."""
    pool: PoolFootprint | None = None
    """Of the job; where None, every scheme is taken to fill the job by itself."""

    @property
    def reserve_bytes(self) -> float:
        """What micro-batches may not take: the device's reserve, and communicators beyond those
        that it covers."""
        num_communicators = 0 if self.pool is None else self.pool.num_communicators
        return self.device.reserve_with(num_communicators)

    @property
    def usable_bytes(self) -> float:
        """What the peak of a run may be."""
        return self.device.memory_bytes - self.reserve_bytes

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch over all cp ranks, 0 where the model does not fit.

        A multiple of 2·tp·cp: the row is padded to one, and so stays within the limit.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        return min(self.stage_tokens(scheme, stage, num) for stage, num in enumerate(layers))

    def stage_tokens(self, scheme: Scheme, stage: int, num_layers: int) -> int:
        """max_tokens as far as one stage goes, if it had num_layers layers."""
        multiple = 2 * scheme.tp * scheme.cp
        usable = self.usable_bytes
        tokens_per_cp_rank = min(
            (usable - moment.fixed_bytes) / moment.bytes_per_token
            for moment in self._moments(scheme, stage, num_layers)
        )
        return max(0, int(tokens_per_cp_rank * scheme.cp) // multiple * multiple)

    def state_bytes(self, scheme: Scheme, stage: int) -> float:
        """What a rank of a stage holds before the first token."""
        return self._state_bytes(scheme, stage, self._num_layers(scheme, stage))

    def between_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """Most while gathering, scattering and updating, after micro-batches of num_tokens."""
        left = self._left_per_token(scheme, stage) * num_tokens / scheme.cp
        return self.state_bytes(scheme, stage) + left

    def peak_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """Most while micro-batches of num_tokens, over all cp ranks, run."""
        return max(
            moment.fixed_bytes + moment.bytes_per_token * num_tokens / scheme.cp
            for moment in self.moments(scheme, stage)
        )

    def moments(self, scheme: Scheme, stage: int) -> tuple[Moment, ...]:
        """When memory of a rank of a stage may peak."""
        return tuple(self._moments(scheme, stage, self._num_layers(scheme, stage)))

    def _num_layers(self, scheme: Scheme, stage: int) -> int:
        return scheme.layers_per_stage(self.shape.num_layers)[stage]

    def _state_bytes(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        shape = self.shape
        num_parameters = num_layers * shape.num_parameters_per_layer
        is_first, is_last = stage == 0, stage == scheme.pp - 1
        if is_first:
            num_parameters += shape.num_embedding_parameters
        if is_last:
            num_parameters += shape.hidden_size
            # With one stage, tied embeddings are one matrix.
            if not (shape.tied_embeddings and is_first):
                num_parameters += shape.num_embedding_parameters
        role = num_parameters / scheme.tp * (self.parameter_bytes + _FP32_BYTES)
        canonical = _CANONICAL_BYTES_PER_PARAMETER * shape.num_parameters / self.num_ranks
        return role + canonical + self._staging_bytes(scheme) + _WORKSPACE_BYTES

    def _staging_bytes(self, scheme: Scheme) -> float:
        """Slots serve every strategy of the pool, and so are as large as the largest needs."""
        ranks_per_node = self.ranks_per_node or self.num_ranks
        pool = self.pool or PoolFootprint.of_scheme(scheme, self.num_ranks, ranks_per_node)
        as_owner, as_role = pool.share_as_owner, pool.share_as_role
        sent = max(as_owner * self.parameter_bytes, as_role * _FP32_BYTES)
        received = max(as_owner * _FP32_BYTES, as_role * self.parameter_bytes)
        relayed = pool.share_relayed * _FP32_BYTES
        layer = self.shape.num_parameters_per_layer
        return _NUM_STAGING_SLOTS * (sent + received + relayed) * layer

    def _moments(self, scheme: Scheme, stage: int, num_layers: int) -> Iterator[Moment]:
        shape, token = self.shape, self._token(scheme)
        is_last = stage == scheme.pp - 1
        state = self._state_bytes(scheme, stage, num_layers)
        kept = (scheme.pp - stage) * self._kept_per_token(scheme, num_layers, is_last=is_last)
        kept += self._left_per_token(scheme, stage)
        matrix = shape.hidden_size * self.parameter_bytes / scheme.tp  # a column or row of one
        if is_last:
            yield Moment("loss", state, kept + self._loss_per_token(scheme))
            yield Moment(
                "output layer",
                state + matrix * shape.vocab_size,
                kept + token.logits + token.hidden + token.hidden_part,
            )
        if is_last and stage == 0 and shape.tied_embeddings:
            # What the output layer gave waits for the embedding's gradient.
            state += matrix * shape.vocab_size
        if is_last:
            kept -= 2 * token.hidden_part  # the final norm's are freed by now
        kept += self._again_per_token(scheme, num_layers) + token.hidden_part
        whole = token.hidden if self._spreads(scheme) else 0.0
        yield Moment(
            "second matrix of the MLP",
            state + matrix * shape.ffn_hidden_size,
            kept + whole + token.mlp,
        )
        num_tensors = _GATED_ACTIVATION_TENSORS if shape.gated_mlp else _PLAIN_ACTIVATION_TENSORS
        yield Moment("activation of the MLP", state, kept + num_tensors * token.mlp)
        freed = self._mlp_per_token(scheme) + 2 * token.hidden_part
        yield Moment("attention", state, kept - freed + self._attention_per_token(scheme))

    def _token(self, scheme: Scheme) -> _Token:
        shape, tp = self.shape, scheme.tp
        hidden = float(shape.hidden_size * self.parameter_bytes)
        return _Token(
            hidden=hidden,
            hidden_part=hidden / (tp if self._spreads(scheme) else 1),
            query=shape.query_size * self.parameter_bytes / tp,
            key=shape.num_query_groups * shape.kv_channels * self.parameter_bytes / tp,
            mlp=shape.ffn_hidden_size * self.parameter_bytes / tp,
            logits=shape.vocab_size * self.parameter_bytes / tp,
        )

    def _spreads(self, scheme: Scheme) -> bool:
        """Whether hidden states are spread over the tp ranks."""
        return self.sequence_parallel and scheme.tp > 1

    def _left_per_token(self, scheme: Scheme, stage: int) -> float:
        """What a micro-batch leaves behind: the buffer into which sequence parallelism gathers, and
        behind the first stage what was received, with its gradient."""
        token = self._token(scheme)
        buffer = token.hidden if self._spreads(scheme) else 0.0
        return buffer + (2 * token.hidden_part if stage > 0 else 0.0)

    def _loss_per_token(self, scheme: Scheme) -> float:
        logits = self._token(scheme).logits
        copy = logits * _FP32_BYTES / self.parameter_bytes
        if self.parameter_bytes == _FP32_BYTES:
            copy = 0.0
        return logits + copy + _LOSS_BYTES_PER_TOKEN

    def _kept_per_token(self, scheme: Scheme, num_layers: int, *, is_last: bool) -> float:
        """Of one micro-batch."""
        recompute, token = self.recompute, self._token(scheme)
        num_again = recompute.num_layers_again(num_layers)
        layers = recompute.num_inputs_kept(num_layers) * token.hidden_part
        layers += (num_layers - num_again) * self._layer_per_token(scheme)
        outputs = (2 if is_last else 1) * token.hidden_part
        rotation = 2 * self.shape.kv_channels * self.parameter_bytes
        return layers + outputs + rotation + _BATCH_BYTES_PER_TOKEN

    def _layer_per_token(self, scheme: Scheme) -> float:
        """What a layer keeps that does not run again as a whole."""
        kept = self._whole_layer_per_token(scheme)
        if self.recompute.drops_mlp:
            kept -= self._mlp_per_token(scheme)
        if self.recompute.drops_core_attention:
            kept += self._given_to_attention_per_token(scheme)
            kept += self._token(scheme).query  # attention's output
            if self.qk_norms:
                kept += self._token(scheme).query + self._token(scheme).key
            kept -= self._kept_by_attention_per_token(scheme)
        return kept

    def _whole_layer_per_token(self, scheme: Scheme) -> float:
        token = self._token(scheme)
        shares = scheme.tp if self._spreads(scheme) else 1
        norms = 4 * token.hidden_part + 2 * _NORM_BYTES_PER_TOKEN / shares
        return norms + self._kept_by_attention_per_token(scheme) + self._mlp_per_token(scheme)

    def _mlp_per_token(self, scheme: Scheme) -> float:
        """The output of fc1 and the input of fc2."""
        return (3 if self.shape.gated_mlp else 2) * self._token(scheme).mlp

    def _kept_by_attention_per_token(self, scheme: Scheme) -> float:
        token = self._token(scheme)
        per_head = _FP32_BYTES * self.shape.num_attention_heads / scheme.tp
        kept = self._attended_per_token(scheme) + token.query + per_head
        if self.qk_norms:  # their inputs keep the linear layer's output, and the values in it
            kept += self._given_to_attention_per_token(scheme) + 2 * per_head
            kept -= token.key if scheme.cp == 1 else 0.0
        return kept + token.query if self._exchanges_heads(scheme) else kept

    def _attended_per_token(self, scheme: Scheme) -> float:
        """Queries, keys and values as the kernel gets them."""
        token, num_copies = self._token(scheme), 1.0
        if self._exchanges_heads(scheme):
            num_copies = max(1.0, scheme.cp * scheme.tp / self.shape.num_query_groups)
        return token.query + 2 * token.key * num_copies

    def _given_to_attention_per_token(self, scheme: Scheme) -> float:
        """The linear layer's output, and a copy of the queries where they lie apart in it."""
        token = self._token(scheme)
        is_grouped = token.key < token.query
        return token.query + 2 * token.key + (token.query if is_grouped else 0.0)

    def _again_per_token(self, scheme: Scheme, num_layers: int) -> float:
        """What the backward of the last layer makes again beside what was kept."""
        recompute, token = self.recompute, self._token(scheme)
        if recompute.num_layers_again(num_layers) == num_layers:
            # The input of the chunk was kept, its output is new.
            return recompute.num_layers_at_once(num_layers) * self._whole_layer_per_token(scheme)
        return self._mlp_per_token(scheme) + token.hidden_part if recompute.drops_mlp else 0.0

    def _attention_per_token(self, scheme: Scheme) -> float:
        """In the backward of core attention, beside what the layer keeps of it.

        The kernel: gradients of output, as it comes and contiguous, queries, keys and values, an
        fp32 sum for queries, and with grouped queries those of keys and values a head. Over cp
        ranks the keys are those of the whole row up to each rank's own second chunk, cp + ½ for
        every token of its own; they are gathered again, and their gradients come apart and then
        together.
        """
        token = self._token(scheme)
        if self._exchanges_heads(scheme):
            keys, values_of_row = self._attended_per_token(scheme), token.query
        elif scheme.cp > 1:
            keys, values_of_row = 2 * token.key * (scheme.cp + 0.5), token.query
            values_of_row *= scheme.cp + 0.5
        else:
            keys, values_of_row = 2 * token.key, token.query
        is_grouped = token.key < token.query
        sums = token.query * _FP32_BYTES / self.parameter_bytes
        kernel = 3 * token.query + sums + (2 * values_of_row if is_grouped else 0.0)
        gathered = keys if scheme.cp > 1 else 0.0
        again = 0.0
        if self.recompute.drops_core_attention:
            again = self._kept_by_attention_per_token(scheme) + token.query
        return again + gathered + keys + max(kernel, keys)

    def _exchanges_heads(self, scheme: Scheme) -> bool:
        """Whether cp ranks exchange tokens for heads."""
        if scheme.cp == 1:
            return False
        num_heads = self.shape.num_attention_heads // scheme.tp
        num_groups = self.shape.num_query_groups // scheme.tp
        return choose_way(self.cp_comm_type, num_heads, num_groups, scheme.cp) == "a2a"
