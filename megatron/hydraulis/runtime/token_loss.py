"""Losses of tokens: log-probabilities without a row's logits, and how a user's loss becomes a sum.

A user's loss gives one number per token; its weight, the sum and the division are the engine's. So
no loss can depend on how sequences were packed. It sees log-probabilities of the labels, and
entropies.

The last stage's output layer has the logits of one chunk of tokens at a time. The forward keeps the
largest logit of each token and the sum of exponentials; the backward computes the logits of a chunk
again. It begins with the last chunk, whose exponentials are kept, so that a row of one chunk needs
no second product. Sums and exponentials are in fp32 (in fp64 for an fp64 model), as in upstream's
cross entropy.

With logits x of a token, their softmax p, the label l and the entropy H:

    log p_l = x_l - max x - log Σ exp(x - max x)       d log p_l / dx_j = [j = l] - p_j
    H       = -Σ p log p                               dH / dx_j        = -p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.cost_model.memory import loss_chunk_tokens
from megatron.hydraulis.data.packed_batch import PackedBatch, token_places
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.adapters import Adapted
from megatron.hydraulis.runtime.executor import (
    ForwardStep,
    at_least_fp32,
    forward_step_of,
    weighted_losses,
    widened,
)

TokenLoss = Callable[[Any, Any, Mapping[str, Tensor], "Segments"], Tensor]
"""``loss(log_probs, entropy, inputs, segments)``: (tokens,) losses of (tokens,) log-probabilities
and entropies; the latter are None unless requested, both with a value head. ``inputs`` are the
sequences' tensors, (tokens, ...), with `TOKEN_IDS` among them also "token_log_probs", and with a
value head "values". All are about predicting the same tokens:
those of this rank's part of a row, without padding and without the first of each sequence, which
nothing predicts. Possibly 0 tokens."""

OUTPUTS = ("log_probs", "entropy", "token_log_probs")
"""Names of what a forward pass can give for each token. The last are (k,) for each, of `TOKEN_IDS`,
which the sequences must have."""
VALUES = "values"
"""The only output of a model with a `ValueHead`."""
TOKEN_IDS = "token_ids"
"""Name of an input, (tokens, k) whole numbers: tokens whose log-probabilities are wanted in the
place of each token, such as those that a teacher finds most likely."""


class Segments:
    """The sequences of a row, of which this rank may hold a part.

    Args:
        index: (tokens,) number of each token's sequence in the row.
        num_sequences: of the row.
        group: ranks that hold the other parts of the row; None if there are none.
    """

    def __init__(
        self, index: Tensor, num_sequences: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.index = index
        self.num_sequences = num_sequences
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        """(tokens,): at each token the sum of (tokens,) values over its whole sequence.

        It has a gradient. Sums are in fp32, or fp64 for fp64; those of a mask are counts.
        Collective over the ranks that share the row.

        Raises ConfigurationError for values of another shape.
        """
        if values.shape != self.index.shape:
            raise ConfigurationError(
                f"segments.sum takes one value per token, here {len(self.index)} in shape "
                f"{tuple(self.index.shape)}, but got shape {tuple(values.shape)}; give (tokens,)"
            )
        summed: Tensor = _SegmentSum.apply(
            widened(values), self.index, self.num_sequences, self._group
        )
        return summed


class _SegmentSum(torch.autograd.Function):
    """y[t] = Σ x[u] over u in t's sequence; the operation is its own transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, num_sequences: int, group: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_sequences, ctx.group = num_sequences, group
        return _segment_sum(values, index, num_sequences, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return _segment_sum(gradients[0], index, ctx.num_sequences, ctx.group), None, None, None


def _segment_sum(values: Tensor, index: Tensor, num_sequences: int, group: Any) -> Tensor:
    sums = values.new_zeros(num_sequences).index_add_(0, index, values)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[index]


def loss_forward_step(
    loss: TokenLoss, *, divisor: float = 1.0, entropy: bool = True, temperature: float = 1.0
) -> ForwardStep:
    """A forward step whose micro-batches give Σ weight · loss ÷ divisor.

    Without ``entropy`` the loss gets None for it. Logits are divided by the temperature.
    """
    finish = partial(_weighted_sum, loss, divisor)
    return forward_step_of(finish, token_outputs(entropy=entropy, temperature=temperature))


def output_forward_step(*, entropy: bool, temperature: float = 1.0) -> ForwardStep:
    """A forward step whose micro-batches report `OUTPUTS`: (tokens,) each, as a loss sees them.

    Entropies are computed and reported only if asked for. Logits are divided by the temperature.
    """
    outputs = token_outputs(entropy=entropy, temperature=temperature)
    return forward_step_of(_report_outputs, outputs)


def check_token_loss(
    loss: TokenLoss,
    inputs: Mapping[str, Tensor],
    num_tokens: int,
    device: torch.device,
    *,
    entropy: bool,
    has_value_head: bool = False,
) -> None:
    """Call a loss with zeros for a sequence and for no token, without a model and other ranks.

    Args:
        inputs: of one sequence, for ``num_tokens`` tokens, on the device.
        entropy: whether it gets entropies.
        has_value_head: whether it gets values instead.

    Raises:
        ConfigurationError: it does not return a tensor of one loss per token, or one that depends
            on no output of the model.
    """
    call = partial(_call_with_zeros, loss, device, entropy, has_value_head)
    losses = call(inputs, num_tokens)
    if not losses.requires_grad:
        raise ConfigurationError(
            f"a loss must depend on {VALUES if has_value_head else 'log_probs or entropy'} but has "
            "no gradient; compute it from them, without detach()"
        )
    # A context-parallel rank may hold no token of a short sequence.
    none = {name: value[:0] for name, value in inputs.items()}
    call(none, 0)


def _call_with_zeros(
    loss: TokenLoss,
    device: torch.device,
    entropy: bool,
    has_value_head: bool,
    inputs: Mapping[str, Tensor],
    num_tokens: int,
) -> Tensor:
    log_probs: Tensor | None
    log_probs, zeros = torch.zeros(2, num_tokens, device=device, requires_grad=True).unbind()
    index = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    if TOKEN_IDS in inputs:
        of_ids = torch.zeros(inputs[TOKEN_IDS].shape, device=device, requires_grad=True)
        inputs = {**inputs, "token_log_probs": of_ids}
    if has_value_head:
        inputs, log_probs, entropy = {**inputs, VALUES: zeros}, None, False
    try:
        return _losses(loss, log_probs, zeros if entropy else None, inputs, Segments(index, 1))
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"a loss is called with {num_tokens} tokens before any rank runs the model, but raised "
            f"{type(error).__name__}: {error}; correct it"
        ) from error


class _Inputs(dict[str, Tensor]):
    """The inputs of a loss, which name the one that is missing."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigurationError(
            f"the loss reads the input {name!r} but the sequences have "
            f"{', '.join(map(repr, self)) or 'none'}; give it to every sequence"
        )


def _losses(
    loss: TokenLoss,
    log_probs: Tensor | None,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    segments: Segments,
) -> Tensor:
    """Returns the losses, after a check that there is one per token."""
    losses = loss(log_probs, entropy, _Inputs(inputs), segments)
    index = segments.index
    if not isinstance(losses, Tensor) or losses.shape != index.shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise ConfigurationError(
            f"a loss returns one number per token, here {index.numel()} in shape "
            f"{tuple(index.shape)}, but returned {found}; return the loss of each token: the "
            "engine weighs and sums them, and divides once"
        )
    if losses.is_complex() or losses.device != index.device:
        raise ConfigurationError(
            f"a loss returns real numbers on {index.device} but returned {losses.dtype} on "
            f"{losses.device}; convert them"
        )
    return losses


def _places(batch: PackedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places in the row of tokens that are not padding, and numbers of their sequences."""
    places, numbers = (torch.from_numpy(each).to(device) for each in token_places(batch)[:2])
    return places, numbers


def _weighted_sum(
    loss: TokenLoss, divisor: float, batch: PackedBatch, outputs: TokenOutputs
) -> tuple[Tensor, int, dict[str, Tensor]]:
    places, numbers = _places(batch, batch.weights.device)
    weights = batch.weights.view(-1)[places]
    found = outputs.at(places)
    for each in found.values():
        if each.requires_grad:
            each.register_hook(partial(_without_nan, weights == 0))
    log_probs, entropy = found.pop("log_probs", None), found.pop("entropy", None)
    segments = Segments(numbers, len(batch.sequence_lengths), batch.context_group)
    losses = _losses(loss, log_probs, entropy, {**batch.inputs, **found}, segments)
    weights = weights.to(at_least_fp32(losses.dtype))
    total = weighted_losses(losses, weights).sum()
    report = torch.stack([total.detach(), weights.sum()])
    return total / divisor, 0, {"lm loss": report}


def _without_nan(untrained: Tensor, gradient: Tensor) -> Tensor:
    """0 in place of 0 · ∞, such as that of a ratio that overflows at an untrained token."""
    untrained = untrained.view(-1, *(1,) * (gradient.dim() - 1))
    return gradient.masked_fill(untrained & gradient.isnan(), 0.0)


def _report_outputs(
    batch: PackedBatch, outputs: TokenOutputs
) -> tuple[Tensor, int, dict[str, Tensor]]:
    places, _ = _places(batch, batch.weights.device)
    return batch.weights.new_zeros(()), 0, outputs.at(places)


class ChunkedOutput:
    """A model that never holds the logits of a row when it is called with labels.

    Its softmax excludes the padding of the vocabulary: otherwise the loss, and so the update, would
    depend on how far the vocabulary is padded.
    """

    @classmethod
    def convert(
        cls,
        model: Any,
        num_tokens_in_vocabulary: int,
        chunk_tokens: int | None,
        *,
        has_value_head: bool = False,
    ) -> None:
        """Give upstream's model this class.

        Args:
            num_tokens_in_vocabulary: without padding.
            chunk_tokens: tokens whose logits exist at the same time, see `OutputSettings`.
            has_value_head: whether a `ValueHead` replaces the output layer.
        """
        model.__class__ = cls
        if not model.post_process:
            return
        config = model.config
        if has_value_head:
            model.output_layer = ValueHead(config, model.output_layer.tp_group)
            return
        scale = config.mup_output_mult if config.use_mup else 1.0
        settings = OutputSettings(num_tokens_in_vocabulary, chunk_tokens, scale)
        ChunkedOutputLayer.convert(model.output_layer, settings)
        if model.output_layer.weight is not None:
            # Upstream sets it for tied embeddings of one stage, in which this has no part.
            model.output_layer.weight.zero_out_wgrad = False


class PackedGPTModel(ChunkedOutput, GPTModel):
    """`GPTModel` whose output is chunked."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *args: Any,
        output_processor: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, except that token losses, (1, tokens), are those of `token_losses`."""
        if labels is not None and output_processor is None:
            output_processor = token_losses
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            *args,
            output_processor=output_processor,
            **kwargs,
        )


_NUM_BLOCKS = 16
"""Blocks in which an entropy reads a chunk's logits, so that what it computes is small."""
_NO_LOGIT = -1e30
"""Logit of a rank without tokens of the vocabulary: its exponential is 0, products are finite."""


@dataclass(frozen=True)
class TokenOutputs:
    """What the last stage computes for each token of a row, with gradients: fp32, or fp64 for an
    fp64 model."""

    log_probs: Tensor | None = None
    """(1, tokens), of the labels; None with a value head."""
    entropy: Tensor | None = None
    """(1, tokens), of the predicted distribution, in nats; None unless requested."""
    token_log_probs: Tensor | None = None
    """(1, tokens, k), of `TOKEN_IDS`; None without them."""
    values: Tensor | None = None
    """(1, tokens), of a value head; None without one."""

    def at(self, places: Tensor) -> dict[str, Tensor]:
        """By name what there is, at some places of the row."""
        rows = {name: getattr(self, name) for name in (*OUTPUTS, VALUES)}
        return {name: row.squeeze(0)[places] for name, row in rows.items() if row is not None}


def token_outputs(*, entropy: bool, temperature: float = 1.0) -> Callable[..., TokenOutputs]:
    """An ``output_processor`` for the call of a `PackedGPTModel` with labels, whose context is the
    row, if that may have `TOKEN_IDS`.

    Args:
        temperature: by which all logits are divided.
    """

    def process(
        *,
        hidden_states: Tensor,
        output_layer: ChunkedOutputLayer | ValueHead,
        output_weight: Tensor | None,
        labels: Tensor,
        context: PackedBatch | None = None,
        **_: Any,
    ) -> TokenOutputs:
        if isinstance(output_layer, ValueHead):
            return TokenOutputs(values=output_layer(hidden_states))
        ids = labels.view(-1, 1)
        if context is not None and TOKEN_IDS in context.inputs:
            others = context.inputs[TOKEN_IDS]
            of_row = ids.new_zeros(len(ids), others.size(1))
            of_row[_places(context, ids.device)[0]] = others.to(ids.dtype)
            ids = torch.cat([ids, of_row], dim=1)
        found: TokenOutputs = output_layer(
            hidden_states, output_weight, ids=ids, entropy=entropy, temperature=temperature
        )
        return found

    return process


def token_losses(**given: Any) -> Tensor:
    """An ``output_processor`` that returns the cross entropy of each token, (1, tokens)."""
    log_probs = token_outputs(entropy=False)(**given).log_probs
    assert log_probs is not None, "a value head has losses of its user"
    return -log_probs


@dataclass(frozen=True)
class OutputSettings:
    """Settings of how logits are made and used."""

    num_tokens_in_vocabulary: int
    """Logits of the padding behind them take no part in the softmax."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at the same time; None for `loss_chunk_tokens`."""
    scale: float = 1.0
    """Factor of all logits."""


class ValueHead(torch.nn.Linear):
    """The value of each token, such as a critic's, from its hidden state.

    With sequence parallelism each TP rank computes those of its part of the row, so that it has a
    part of the gradients' sum.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype)
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        parameter: Any
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            torch.nn.init.normal_(self.weight, std=config.init_method_std)
            torch.nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Does nothing: the constructor initialises."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, tokens) of the whole row, from (tokens, 1, hidden size) or this rank's part of it."""
        found = F.linear(widened(hidden.squeeze(1)), widened(self.weight), widened(self.bias))
        if self.sequence_parallel:
            # Every rank has the whole loss, so that the backward takes its part of the gradient.
            found = gather_from_sequence_parallel_region(
                found, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return found.t()


class ChunkedOutputLayer(ColumnParallelLinear):
    """Upstream's output layer, which returns `TokenOutputs` instead of logits if it gets ids."""

    settings: OutputSettings
    is_embedding = False
    """Whether the weight is that of an embedding in the same stage, too."""

    @classmethod
    def convert(cls, layer: ColumnParallelLinear, settings: OutputSettings) -> None:
        """Give an existing layer this class: `GPTModel` has no parameter for it."""
        layer.__class__ = AdaptedOutputLayer if isinstance(layer, Adapted) else cls
        layer.settings = settings

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        ids: Tensor | None = None,
        entropy: bool = False,
        temperature: float = 1.0,
        completes_gradient: bool = True,
    ) -> Any:
        """Upstream's forward, unless there are ids.

        Args:
            input_: (tokens, 1, hidden size); with sequence parallelism this rank's part of it.
            weight: the embedding's if it is shared within the stage.
            ids: (tokens, 1 + k), of all tokens: the label, and `TOKEN_IDS`.
            temperature: by which all logits are divided.
            completes_gradient: False for all but one of several uses of a row's weight.
        """
        if ids is None:
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        elif self.allreduce_dgrad:
            input_ = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        is_shared = self.weight is None or self.is_embedding
        matrix = self.weight if weight is None else weight
        hidden = input_.squeeze(1)
        low, rows = hidden.new_empty(len(hidden), 0), matrix.new_empty(len(matrix), 0)
        if isinstance(self, AdaptedOutputLayer) and self.adapters.are_used:
            low, rows = self.adapters(hidden)
        num_columns, first = matrix.size(0), matrix.size(0) * self.tp_group.rank()
        columns = _Columns(
            num_real=min(max(self.settings.num_tokens_in_vocabulary - first, 0), num_columns),
            chunk_tokens=self.settings.chunk_tokens or loss_chunk_tokens(num_columns),
            scale=self.settings.scale / temperature,
            group=self.tp_group if self.tp_group.size() > 1 else None,
            completes_gradient=completes_gradient and not is_shared,
        )
        log_probs, entropies = _TokenOutputs.apply(
            hidden, matrix, low, rows, ids - first, columns, entropy
        )
        return TokenOutputs(
            log_probs[None, :, 0],
            None if entropies is None else entropies[None],
            log_probs[None, :, 1:] if ids.size(1) > 1 else None,
        )


class AdaptedOutputLayer(Adapted, ChunkedOutputLayer):
    """An output layer with an adapter."""


@dataclass(frozen=True)
class _Columns:
    """A tp rank's part of the output matrix."""

    num_real: int
    """Columns of logits that are not padding, which comes last."""
    chunk_tokens: int
    scale: float
    group: dist.ProcessGroup | None
    """The ranks with the other parts."""
    completes_gradient: bool
    """Whether the matrix has no other use in the stage, whose gradient comes later."""

    def chunks(self, num_tokens: int) -> list[slice]:
        """Makes the fewest chunks, almost equal in size. Entropies do not change them, so
        log-probabilities are equal bit by bit with and without."""
        num_chunks = -(-num_tokens // self.chunk_tokens)
        size = -(-num_tokens // num_chunks)
        return [slice(start, start + size) for start in range(0, num_tokens, size)]

    def logits(self, hidden: Tensor, weight: Tensor, low: Tensor, rows: Tensor) -> Tensor:
        """(tokens, columns) logits of a chunk; see `_TokenOutputs.forward`."""
        logits = _product(hidden, weight.t())
        if low.size(1):
            _add_product(logits, low, rows.t())
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.num_real == 0:
            logits.fill_(_NO_LOGIT)
        return logits

    def real(self, logits: Tensor) -> Tensor:
        """A view without the padding, at least one column."""
        return logits[:, : max(self.num_real, 1)]


class _TokenOutputs(torch.autograd.Function):
    """Log-probabilities, (tokens, ids), and entropies, (tokens,), which are None unless requested.

    Gradients of an adapter are autograd's.
    ``weight.main_grad`` receives the weight's gradient, chunk by chunk, unless it is frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor,
        rows: Tensor,
        ids: Tensor,
        columns: _Columns,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            ctx: autograd's.
            hidden: (tokens, hidden size).
            weight: (columns, hidden size).
            low: (tokens, rank) of an adapter; its rank is 0 without one.
            rows: (columns, rank), with which it adds low · rowsᵀ to the logits.
            ids: (tokens, ids), counted from this rank's first column; those of others are outside.
            columns: of the weight.
            with_entropy: whether entropies are wanted.
        """
        is_here = (ids >= 0) & (ids < columns.num_real)
        ids = ids.clamp(0, max(columns.num_real - 1, 0))
        largest = hidden.new_empty(hidden.size(0), dtype=at_least_fp32(hidden.dtype))
        # Of exponentials, of exponentials times logits less the largest, and logits of the ids.
        num_sums = 2 if with_entropy else 1
        sums = largest.new_zeros(num_sums + ids.size(1), hidden.size(0))

        def exponentials(chunk: slice) -> Tensor:
            logits = columns.logits(hidden[chunk], weight, low[chunk], rows)
            real = columns.real(logits)
            largest[chunk] = real.amax(dim=1)
            sums[num_sums:, chunk] = (real.gather(1, ids[chunk]) * is_here[chunk]).t()
            real.sub_(largest[chunk, None])
            if with_entropy:
                for part, of_part in zip(_blocks(real), _blocks(sums[1, chunk]), strict=True):
                    of_part.copy_(part.exp().mul_(part).sum(dim=1))
            sums[0, chunk] = real.exp_().sum(dim=1)
            return logits

        kept = None
        for chunk in columns.chunks(hidden.size(0)):
            kept = None  # freed before the next ones exist
            kept = exponentials(chunk)
        most = largest
        if columns.group is not None:
            most = largest.clone()
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=columns.group)
            sums[1:num_sums] += (largest - most) * sums[0]
            sums[:num_sums] *= (largest - most).exp()
            dist.all_reduce(sums, group=columns.group)
        log_sum = sums[0].log()
        log_probs = (sums[num_sums:] - most - log_sum).t()
        entropy = log_sum - sums[1] / sums[0] if with_entropy else None
        ctx.columns, ctx.kept = columns, kept
        ctx.save_for_backward(
            hidden, weight, low, rows, ids, is_here, largest, most, sums[0], entropy
        )
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None, None, None]:
        hidden, weight, low, rows, ids, is_here, largest, most, total, entropy = ctx.saved_tensors
        columns: _Columns = ctx.columns
        is_trained = ctx.needs_input_grad[1]
        if of_log_probs is None:
            of_log_probs = total.new_zeros(ids.shape)
        gradient = of_log_probs.sum(dim=1)
        of_log_probs = of_log_probs * is_here
        share = (largest - most).exp() / total  # softmax over this rank's exponentials
        hidden_gradient, low_gradient = torch.empty_like(hidden), torch.empty_like(low)
        rows_gradient = torch.zeros_like(rows, dtype=at_least_fp32(rows.dtype))

        def accumulate(chunk: slice, logits: Tensor | None) -> None:
            factor = -(gradient * share)[chunk, None]
            if logits is None:
                logits = columns.logits(hidden[chunk], weight, low[chunk], rows)
                columns.real(logits).sub_(largest[chunk, None])
                if of_entropy is None:
                    columns.real(logits).exp_()
            real = columns.real(logits)
            if of_entropy is None:
                real.mul_(factor)
            else:  # these are logits
                shift = (largest - most - total.log() + entropy)[chunk, None]
                slope = -(of_entropy * share)[chunk, None]
                for part, *terms in zip(*map(_blocks, (real, shift, slope, factor)), strict=True):
                    of_part = (part + terms[0]).mul_(terms[1]).add_(terms[2])
                    part.exp_().mul_(of_part)
            # The label may be one of the other ids, which differ.
            for part in (slice(0, 1), slice(1, None)):
                real.scatter_add_(1, ids[chunk, part], of_log_probs[chunk, part])
            logits[:, columns.num_real :] = 0.0
            if columns.scale != 1.0:
                logits.mul_(columns.scale)
            logits = logits.to(hidden.dtype)
            torch.mm(logits, weight, out=hidden_gradient[chunk])
            if low.size(1):
                torch.mm(logits, rows, out=low_gradient[chunk])
                _add_product(rows_gradient, logits.t(), low[chunk])
            if is_trained:
                _add_product(weight.main_grad, logits.t(), hidden[chunk])

        # The gradient of an entropy needs logits, not exponentials.
        kept, ctx.kept = (ctx.kept if of_entropy is None else None), None
        for chunk in reversed(columns.chunks(hidden.size(0))):
            accumulate(chunk, kept)
            kept = None
        of_adapter = low_gradient, rows_gradient.to(rows.dtype)
        if not is_trained:
            return hidden_gradient, None, *of_adapter, None, None, None
        weight.grad_added_to_main_grad = True
        # By upstream's rules the gradient is meaningless now, but its arrival completes the bucket.
        # This one needs no memory.
        arrival = weight.detach() if columns.completes_gradient else None
        return hidden_gradient, arrival, *of_adapter, None, None, None


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows each, the same rows for tensors of the same length."""
    return rows.split(-(-rows.size(0) // _NUM_BLOCKS))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product in fp32, or in fp64 for fp64."""
    dtype = at_least_fp32(left.dtype)
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add it to a matrix of at least the same precision, without a temporary one on CUDA."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
