"""Memory of a rank, and the most tokens of a micro-batch that fits in it.

Between iterations a tensor-parallel rank holds its *state* (`state_bytes`):

- its parameters in the training precision and their gradients in fp32; of those that it shares with
  other ranks (``fs``) its share, and slots where they are whole while they are used: weights of a
  layer and each that is gathered ahead, of the embedding and of the output layer; gradients of two
  layers, and of embedding or output layer; and what it receives of a gradient;
- its canonical shard: fp32 master weights, two moments and the gradient over all ranks of the job;
  with one stage the gradient takes the place of gradients that have been sent. Of frozen parameters
  there is one copy in the training precision, here and above. Those of layers with and without
  experts count as the smaller ones;
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
  gradients of the outputs of all experts; in grouped products, of all experts at the same time, and
  one more tensor as wide, once these gradients are freed;
- *attention*: what the kernel and the exchange with cp ranks need, less the MLP's activations,
  which are freed by then.

What layers keep and what attention needs is in layer_memory.py. Besides its layers a stage keeps
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

from megatron.hydraulis.cost_model.device import Reserve
from megatron.hydraulis.cost_model.layer_memory import LayerMemory
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.staging import PoolFootprint, footprint_of_scheme
from megatron.hydraulis.cost_model.trained_model import SAFE_EXPERT_LOAD, TrainedModel
from megatron.hydraulis.frozen import StageLayers
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.transfer.canonical import DEFAULT_BUCKET_CAP_ELEMENTS
from megatron.hydraulis.transfer.role import NUM_GRADIENT_SLOTS

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
    def reserve(self) -> Reserve:
        """Memory kept free of micro-batches, by the communicators and connections of the pool."""
        if self.pool is None:
            return self.device.reserve()
        return self.device.reserve(self.pool.num_communicators, self.pool.num_peers)

    @property
    def reserve_bytes(self) -> float:
        """Memory kept free of micro-batches."""
        return self.reserve.num_bytes

    @property
    def usable_bytes(self) -> float:
        """Limit of the peak."""
        return self.device.memory_bytes - self.reserve_bytes

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch over all cp ranks, 0 if the model does not fit.

        A multiple of 2·tp·cp, to which rows are padded.
        """
        stages = range(scheme.pp)
        return min(self.stage_tokens(scheme, i, self._num_layers(scheme, i)) for i in stages)

    def stage_tokens(self, scheme: Scheme, stage: int, num_layers: int) -> int:
        """`max_tokens` of one stage with num_layers layers, those of multi-token prediction among
        them."""
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
        return self.stage_layers(scheme, stage).number

    def role_bytes(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """Parameters and gradients of a rank of a stage, with slots for those that it shares.

        num_layers: instead of the scheme's.
        """
        shape, num_layers = self.shape, num_layers or self._num_layers(scheme, stage)
        is_first, is_last = stage == 0, stage == scheme.pp - 1
        num_embeddings = self._num_embeddings(scheme, stage)
        num_parameters = self.num_layer_parameters(scheme, num_layers, are_first=is_first)
        embedding = shape.num_embedding_parameters / scheme.tp
        final_norm = is_last * shape.hidden_size
        num_parameters += num_embeddings * embedding + final_norm
        num_parameters += is_last * self._num_of_projections(scheme)
        gradient_bytes = self.has_optimizer * FP32_BYTES
        num_trained = self._num_trained_of_role(scheme, stage, num_layers)
        adapters = self.num_adapter_parameters(num_layers, are_first=is_first, has_output=is_last)
        # Few, so they count whole, with their slots, where ranks share them.
        of_adapters = adapters * (self.parameter_bytes + gradient_bytes)
        if self.lora is not None:
            gradient_bytes = 0
        if not scheme.shares_weights:
            held_bytes = num_parameters * self.parameter_bytes
            return held_bytes + num_trained * gradient_bytes + of_adapters

        def kept(number: float, num_layers: int) -> float:
            if scheme.ep == 1:
                return number / scheme.fs
            num_with_experts = min(num_layers, shape.num_expert_layers)
            routed = num_with_experts * shape.num_routed_entries / scheme.ep
            return (number - routed) / scheme.fs + routed / scheme.num_holders

        num_bytes = kept(num_parameters, num_layers) * self.parameter_bytes + of_adapters
        layers = self._layers(scheme, stage, num_layers)
        num_bytes += kept(num_trained, layers.trained) * gradient_bytes
        of_kinds = [
            self.shared_parameters(scheme, has_experts=has_experts)
            for has_experts in self.kinds_of_layers
        ]
        layer = max(sum(shared.values()) for shared in of_kinds)
        num_slots = min(1 + self.fs_prefetch, num_layers)
        weights = num_slots * layer + num_embeddings * embedding + final_norm
        # Gradients of embedding and output layer take turns.
        if self.frozen.embedding and self.frozen.has_output_matrix(shape):
            embedding = 0.0
        gradients = min(NUM_GRADIENT_SLOTS, layers.trained) * layer + embedding + final_norm
        if (wire_bytes := self.footprint(scheme).gradient_bytes) == FP32_BYTES:
            shares = (sum(part / num for num, part in shared.items()) for shared in of_kinds)
            received = max(*shares, embedding / scheme.fs)
        else:  # also what is sent, in that precision
            received = 2 * max(layer, embedding) * wire_bytes / FP32_BYTES
        return num_bytes + weights * self.parameter_bytes + (gradients + received) * gradient_bytes

    def _num_embeddings(self, scheme: Scheme, stage: int) -> int:
        """Matrices as large as the embedding that a stage holds. With one stage, those of a tied
        model are one; layers of multi-token prediction embed tokens on the last."""
        shape, is_last = self.shape, stage == scheme.pp - 1
        has_embedding = stage == 0 or (is_last and shape.num_predictions > 0)
        return has_embedding + (is_last and not (shape.tied_embeddings and has_embedding))

    def _num_of_projections(self, scheme: Scheme) -> float:
        """Parameters of a rank of the last stage that layers of multi-token prediction have more
        than others."""
        projection = self.shape.num_projection_entries / scheme.tp
        return self.shape.num_predictions * (projection + 3 * self.shape.hidden_size)

    def _layers(self, scheme: Scheme, stage: int, num_layers: int) -> StageLayers:
        """Those of a stage, or as many as another one may have."""
        found = self.stage_layers(scheme, stage)
        return found if found.number == num_layers else self.usual_layers(num_layers)

    def _num_trained_of_role(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        """Elements of a rank's gradients, without adapters."""
        shape, frozen = self.shape, self.frozen
        layers = self._layers(scheme, stage, num_layers)
        are_first = stage == 0 and layers.trained == num_layers
        number = self.num_layer_parameters(scheme, layers.trained, are_first=are_first)
        embedding = shape.num_embedding_parameters / scheme.tp
        is_last = stage == scheme.pp - 1
        number += is_last * self._num_of_projections(scheme)
        has_first = (stage == 0 or self._num_embeddings(scheme, stage) > 1) and not frozen.embedding
        number += has_first * embedding
        if is_last and not (shape.tied_embeddings and stage == 0):
            number += (not frozen.has_output_matrix(shape)) * embedding
        return number + (is_last and not frozen.output) * shape.hidden_size

    def activation_bytes(self, scheme: Scheme, stage: int, num_tokens: int) -> float:
        """What micro-batches in flight keep for their backward, of num_tokens over all cp ranks."""
        kept = self._kept_per_token(scheme, stage, self._num_layers(scheme, stage))
        return (scheme.pp - stage) * kept * num_tokens / scheme.cp

    def state_bytes(self, scheme: Scheme, stage: int, num_layers: int | None = None) -> float:
        """What a rank of a stage holds between iterations; num_layers as for `role_bytes`."""
        shape, role = self.shape, self.role_bytes(scheme, stage, num_layers)
        per_parameter = self.parameter_bytes
        if self.has_optimizer:
            per_parameter = _CANONICAL_BYTES_PER_PARAMETER
        canonical = per_parameter * self._owned
        canonical += self.parameter_bytes * self.num_frozen / self.num_ranks
        if self.has_optimizer and not self.accumulates and scheme.pp == 1 and scheme.fs == 1:
            canonical -= FP32_BYTES * self._gradients_in_place(scheme)
        footprint = self.footprint(scheme)
        products: float = _WORKSPACE_BYTES
        if self.has_te_layers or self.groups_experts:
            num_entries: float = shape.num_attention_entries
            if shape.num_expert_layers < shape.num_layers:
                num_entries += shape.num_mlp_entries
            num_entries += shape.num_expert_entries - shape.num_routed_entries
            num_entries *= footprint.weight_shapes
            # One expert, which ep leaves whole.
            num_entries += shape.num_routed_entries / max(shape.num_experts, 1)
            num_entries *= len(self.frozen.layers) < shape.num_layers
            workspaces = _TE_WORKSPACE_BYTES * (1 + _TE_STREAMS * self.groups_experts)
            products += workspaces + num_entries * self.parameter_bytes
        staging = footprint.staging_bytes(shape.num_parameters_per_layer, self.parameter_bytes)
        return role + canonical + staging + products

    def _gradients_in_place(self, scheme: Scheme) -> float:
        """Elements of the shard's gradient that lie where the arena's gradients were sent from;
        those of adapters, which are few, are neglected.

        That of a bucket begins where the bucket ends in the arena, or later
        (`Arena.place_of_shards`): beyond the arena's end are those of the last bucket, or what the
        last layer moves all of them by.
        """
        shape = self.shape
        if self.lora is not None or not self.num_trained:
            return 0.0
        held, owned = self._num_trained_of_role(scheme, 0, shape.num_layers), self._owned
        last = min(shape.num_embedding_parameters, DEFAULT_BUCKET_CAP_ELEMENTS) / self.num_ranks
        behind = shape.num_parameters_per_layer
        has_output = not (shape.tied_embeddings or self.frozen.output)
        behind += has_output * shape.num_embedding_parameters
        layer = self.num_layer_parameters(scheme, 1)
        moved = layer - (held - owned) * behind / self.num_trained
        return max(0.0, owned - max(last, moved))

    @property
    def _owned(self) -> float:
        """Elements of a canonical shard that are trained."""
        return self.num_trained / self.num_ranks

    def footprint(self, scheme: Scheme) -> PoolFootprint:
        """The footprint of the job's pool, or of a job that the scheme fills."""
        ranks_per_node = self.ranks_per_node or self.num_ranks
        return self.pool or footprint_of_scheme(
            scheme, self.shape, self.num_ranks, ranks_per_node, self.gradient_bytes, self.frozen
        )

    def moments(
        self, scheme: Scheme, stage: int, num_layers: int | None = None
    ) -> Iterator[Moment]:
        """The points at which memory of a rank of a stage may peak; num_layers as for `role_bytes`.

        Each has a list of what is alive, in bytes per token; what was freed is negative.
        """
        num_layers = num_layers or self._num_layers(scheme, stage)
        shape, layers = self.shape, self._layers(scheme, stage, num_layers)
        layer = self._layer(scheme, is_frozen=not layers.trained)
        # Whether the gradient of a matrix exists outside the arena.
        has_weight_gradients = layers.trained > 0 and not self.has_te_layers
        is_last = stage == scheme.pp - 1
        state = self.state_bytes(scheme, stage, num_layers)
        state += self._adapter_copies_bytes(scheme, stage, num_layers)
        whole = layer.hidden if layer.num_shares > 1 else 0.0
        in_flight = (scheme.pp - stage) * self._kept_per_token(scheme, stage, num_layers)
        received = 2 * layer.hidden_part if stage > 0 else 0.0  # with its gradient
        # The buffer; products of frozen weights gather into memory that is freed, too.
        gathered = 0.0 if self.has_te_layers or self.lora is not None else whole
        if is_last and shape.num_predictions:
            gathered = 2 * whole  # what the projection gathers: two hidden states
            if scheme.pp == 1:  # the gradient of the embedding by its later use
                state += shape.num_embedding_parameters / scheme.tp * self.parameter_bytes
        always = (in_flight, received, gathered)
        final_norm = 0.0
        if is_last:
            final_norm = (2 + self.widening) * layer.hidden_part
            num_again = self.recompute_of(scheme).num_layers_again(num_layers)
            is_kept = self.fuses_rope or num_again > 0
            table = 0.0 if is_kept else self._rotary_table_per_token(scheme)
            # Of a layer of multi-token prediction, the hidden state for its logits, too.
            num_before = shape.num_predictions
            with_loss = (*always, num_before * whole, whole, _LOSS_BYTES_PER_TOKEN)
            num_columns = shape.vocab_size // scheme.tp
            chunk_tokens = self.loss_chunk_tokens or loss_chunk_tokens(num_columns)
            logits = (1 + num_before) * num_columns * FP32_BYTES
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
            weight = shape.hidden_size * expert if has_weight_gradients else 0.0
            # Grouped products scale gradients after those of the outputs are freed.
            scaled = max(layer.copies, chosen) if self.groups_experts else layer.copies
            alive = sum((*in_layer, scaled, num_tensors * chosen))
            yield Moment("an expert", state + weight, alive)
        if shape.num_expert_layers < shape.num_layers:
            weight = shape.hidden_size * layer.mlp if has_weight_gradients else 0.0
            second = sum((*in_layer, whole, layer.mlp))
            yield Moment("second matrix of the MLP", state + weight, second)
            num_tensors += not layer.keeps_input("linear_fc2")  # which is not freed
            activation = sum((*in_layer, num_tensors * layer.mlp))
            yield Moment("activation of the MLP", state, activation)
        if self.has_te_layers:
            # The gradient of its output is all that is left of the inside.
            of_output = (2 if shape.gated_mlp else 1) * layer.mlp
            inputs = 2 * whole + layer.hidden_part
            first = sum((*in_layer, -layer.kept_by_mlp, of_output, inputs))
            yield Moment("first matrix of the MLP", state, first)
        last_mlp = layer.kept_by_last_mlp(num_layers, are_first=stage == 0)
        last_mlp += (1 + layer.keeps_input("linear_fc1")) * layer.hidden_part
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

    def _adapter_copies_bytes(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        """What micro-batches in flight keep of adapters: those of one of Megatron's layers are
        copied into two matrices (runtime/adapters.py)."""
        if self.lora is None:
            return 0.0
        recompute, most = self.recompute_of(scheme), 0
        for has_experts in self.kinds_of_layers:
            num_entries = 0
            for parts in self.adapted_linears(has_experts=has_experts):
                width = sum(each.num_outputs for each in parts) + parts[0].num_inputs
                num_entries += len(parts) * self.lora.rank * width
            most = max(most, num_entries)
        num_kept = num_layers - recompute.num_layers_again(num_layers)
        num_copies = (scheme.pp - stage) * num_kept + recompute.num_layers_at_once(num_layers)
        return num_copies * most * self.parameter_bytes

    def _layer(self, scheme: Scheme, *, is_frozen: bool = False) -> LayerMemory:
        return LayerMemory(model=self, scheme=scheme, is_frozen=is_frozen)

    def _kept_per_token(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        """What one micro-batch keeps on a stage."""
        recompute, layer = self.recompute_of(scheme), self._layer(scheme)
        by_backward = self._layers(scheme, stage, num_layers)
        num_layers -= by_backward.idle
        num_again = recompute.num_layers_again(num_layers)
        num_trained = min(by_backward.trained, num_layers - num_again)
        layers = recompute.num_inputs_kept(num_layers) * layer.hidden_part
        for is_frozen, number in enumerate((num_trained, num_layers - num_again - num_trained)):
            layers += self._layer(scheme, is_frozen=bool(is_frozen)).kept_by(
                number, are_first=stage == 0 and number == by_backward.number
            )
        # In fp32, norms keep a copy of the stage's first input and of the last stage's output.
        num_outputs = 2 if stage == scheme.pp - 1 else 1
        outputs = num_outputs * (1 + self.widening) * layer.hidden_part
        rotation: float = 2 * self.shape.rotary_channels * self.parameter_bytes
        if self.fuses_rope:
            rotation = self._rotary_table_per_token(scheme)
        elif num_again:
            rotation += self._rotary_table_per_token(scheme)
        kept = layers + outputs + rotation + _BATCH_BYTES_PER_TOKEN
        if stage == scheme.pp - 1:
            kept += self.shape.num_predictions * self._kept_by_prediction(scheme)
        return kept

    def _kept_by_prediction(self, scheme: Scheme) -> float:
        """What a layer of multi-token prediction keeps more than others: input of the norm of the
        embedded tokens, both normed, and input and output of its own last norm; if it is recomputed
        the embedded tokens and its output. The projection's output, of which tp ranks use a part
        each, is whole. Besides its tokens, and sums of its cross entropy."""
        layer = self._layer(scheme)
        states = 5 * layer.hidden_part + layer.hidden - layer.hidden_part
        if self.recompute_of(scheme).granularity == "full":
            states = 2 * layer.hidden_part
        return states + _BATCH_BYTES_PER_TOKEN - 8 + _LOSS_BYTES_PER_TOKEN

    def _rotary_table_per_token(self, scheme: Scheme) -> float:
        """Angles of all positions of the row, which all of its cp ranks hold."""
        return float(scheme.cp * self.shape.rotary_channels * FP32_BYTES)
