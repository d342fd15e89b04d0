"""Memory of a rank, and from it the most tokens a micro-batch may hold.

A rank of stage i in a scheme holds, all per tensor-parallel rank:

- its parameters in the training precision and their gradients in fp32;
- its canonical shard: fp32 master weights, two moments and the gradient over all ranks of the job;
- staging buffers of the largest bucket, which is a layer (embeddings are cut into buckets): one to
  send from and one to receive into, in each dtype that travels, the parameters' and fp32 for
  gradients. On the side of the role a buffer holds a layer over tp; on the side of the owner it
  holds, over all destinations or sources, up to a whole layer (where every rank is a replica);
- activations per token and layer, times layers, times min(v, pp - i) micro-batches in flight
  (1F1B), where v is taken as large;
- on the last stage, of one micro-batch, the logits in the training precision (in the backward
  their gradient) and cross entropy's fp32 copy, which becomes softmax and gradient in place; in
  fp32 there is no copy, but two are counted;
- a reserve, see DeviceConstants.

With full recompute only the inputs of the recomputed chunks stay for every micro-batch in flight,
and one chunk is there whole. Selective recompute of the MLP keeps what is inside it of one layer
only; that of core attention saves nothing in this count, which knows no scores (queries, keys and
values are its inputs and the output is the projection's).

Activations of a layer that attends without storing scores (FlashAttention), per token, in
elements: the inputs of both norms and their outputs (4h); query, key, value and the attention's
output (2q + 2kv); the output of fc1, one or two ffn wide, and the input of fc2 (ffn). This is the
count of arXiv 2205.05198 §4.1 without dropout and with grouped queries and gated MLPs.
"""

from dataclasses import dataclass

from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.exchange import exchange_of
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.scheme import Scheme

__all__ = ["MemoryModel"]

_FP32_BYTES = 4
# Master weight, first moment, second moment, summed gradient: all fp32.
_CANONICAL_BYTES_PER_PARAMETER = 4 * _FP32_BYTES
# Upstream's cross entropy works in place on an fp32 copy of the logits.
_CROSS_ENTROPY_BYTES_PER_ENTRY = _FP32_BYTES


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

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch over all cp ranks, 0 where the model does not fit.

        A multiple of 2·tp·cp: the row is padded to one, and so stays within the limit.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        return min(self.stage_tokens(scheme, stage, num) for stage, num in enumerate(layers))

    def stage_tokens(self, scheme: Scheme, stage: int, num_layers: int) -> int:
        """max_tokens as far as one stage goes, if it had num_layers layers."""
        multiple = 2 * scheme.tp * scheme.cp
        free = self.device.memory_bytes - self.device.reserve_bytes
        free -= self._state_bytes(scheme, stage, num_layers)
        tokens_per_cp_rank = free / self._bytes_per_token(scheme, stage, num_layers)
        return max(0, int(tokens_per_cp_rank * scheme.cp) // multiple * multiple)

    def state_bytes(self, scheme: Scheme, stage: int) -> float:
        """What a rank of a stage holds before the first token."""
        num_layers = scheme.layers_per_stage(self.shape.num_layers)[stage]
        return self._state_bytes(scheme, stage, num_layers)

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
        return role + canonical + self._staging_bytes(scheme)

    def _staging_bytes(self, scheme: Scheme) -> float:
        """Gather sends as owner and receives as role, scatter the other way round."""
        as_owner = self.shape.num_parameters_per_layer
        as_role = as_owner / scheme.tp
        if self.parameter_bytes == _FP32_BYTES:
            # One dtype, and so one pair of buffers, for parameters and gradients.
            return 2 * _FP32_BYTES * as_owner
        return (self.parameter_bytes + _FP32_BYTES) * (as_owner + as_role)

    def bytes_per_token(self, scheme: Scheme, stage: int) -> float:
        """What every token of a micro-batch on a cp rank adds to a rank of a stage."""
        num_layers = scheme.layers_per_stage(self.shape.num_layers)[stage]
        return self._bytes_per_token(scheme, stage, num_layers)

    def _bytes_per_token(self, scheme: Scheme, stage: int, num_layers: int) -> float:
        num_in_flight = scheme.pp - stage
        activations = self._activations_per_token(scheme, num_layers, num_in_flight)
        logits = 0.0
        if stage == scheme.pp - 1:
            bytes_per_entry = self.parameter_bytes + _CROSS_ENTROPY_BYTES_PER_ENTRY
            logits = bytes_per_entry * self.shape.vocab_size / scheme.tp
        exchange = exchange_of(self.shape, scheme, self.parameter_bytes, self.cp_comm_type)
        return activations + logits + exchange.held_bytes

    def _activations_per_token(self, scheme: Scheme, num_layers: int, num_in_flight: int) -> float:
        """Of num_layers layers, for num_in_flight micro-batches of which one runs backward."""
        recompute = self.recompute
        num_again = recompute.num_layers_again(num_layers)
        whole_layer = self._layer_bytes_per_token(scheme)
        kept_layer, at_once = whole_layer, recompute.num_layers_at_once(num_layers) * whole_layer
        if recompute.drops_mlp:
            at_once = self._mlp_bytes_per_token(scheme)
            kept_layer -= at_once
        inputs = recompute.num_inputs_kept(num_layers) * self._hidden_bytes_per_token(scheme)
        return num_in_flight * (inputs + (num_layers - num_again) * kept_layer) + at_once

    def _hidden_bytes_per_token(self, scheme: Scheme) -> float:
        """One hidden state; only sequence parallelism spreads it over the tp ranks."""
        num_shares = scheme.tp if self.sequence_parallel else 1
        return self.shape.hidden_size * self.parameter_bytes / num_shares

    def _layer_bytes_per_token(self, scheme: Scheme) -> float:
        shape = self.shape
        key_value_size = shape.num_query_groups * shape.kv_channels
        split = (2 * shape.query_size + 2 * key_value_size) * self.parameter_bytes / scheme.tp
        mlp = self._mlp_bytes_per_token(scheme)
        return 4 * self._hidden_bytes_per_token(scheme) + split + mlp

    def _mlp_bytes_per_token(self, scheme: Scheme) -> float:
        """The output of fc1 and the input of fc2."""
        num_ffn = 3 if self.shape.gated_mlp else 2
        return num_ffn * self.shape.ffn_hidden_size * self.parameter_bytes / scheme.tp
