"""Multi-token prediction: upstream's layers on packed rows, and the losses of what they predict.

Upstream shifts ids, labels and weights by messages, across the borders of padded sequences. Here
each layer takes its own from the row (`PredictedTokens`), so that it predicts within a sequence
only, whichever ranks share it.

As upstream, a layer's loss is a mean over the tokens that it predicts, which are fewer than those
of the main loss, and the losses of the D layers enter with ``mtp_loss_scaling_factor`` / D each.
The gradient is summed and divided once, by the weights W of the main loss. So a layer whose tokens
weigh W' enters the sum with W / W' more: of the global batch, where upstream takes each row's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch, PredictedTokens
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import RoleModel, weighted_losses
from megatron.hydraulis.runtime.packed_rows import PackedRow
from megatron.hydraulis.runtime.token_loss import PackedGPTModel


class PredictionLayer(MultiTokenPredictionLayer):
    """Upstream's layer, which takes its tokens from the row."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: PackedRow | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        tokens = _predictions(packed_seq_params, self.layer_number)[self.layer_number - 1].tokens
        embedded = embedding(input_ids=tokens, position_ids=position_ids)
        return input_ids, position_ids, padding_mask, embedded, hidden_states


def _predictions(row: Any, number: int) -> tuple[PredictedTokens, ...]:
    found: tuple[PredictedTokens, ...] = getattr(row, "predictions", ())
    if len(found) < number:
        raise ConfigurationError(
            f"a row has shifted tokens for every layer of multi-token prediction, at least "
            f"{number}, but has them for {len(found)}; pack it with num_predictions={number}"
        )
    return found


class PredictionBlock(MultiTokenPredictionBlock):
    """Upstream's layers, one after another."""

    def forward(self, hidden_states: Tensor, **given: Any) -> list[Tensor]:
        """The hidden states of each layer, of which the first takes those of the final norm."""
        states = []
        for layer in self.layers:
            hidden_states, *_ = layer(hidden_states=hidden_states, **given)
            states.append(hidden_states)
        return states


class PredictingGPTModel(PackedGPTModel):
    """The last stage of a model with multi-token prediction."""

    prediction_scales: Tensor
    """(layers,) factors by which the layers' weighted losses enter the sum of the main loss."""
    prediction_sums: Tensor
    """(layers, 2) Σ weight · loss and Σ weight of this rank's rows; see `begin_predictions`."""

    def _postprocess(self, hidden_states: Tensor, **given: Any) -> Any:
        """Upstream's; in training the backward of the hidden states adds the losses' gradients."""
        if self.training and torch.is_grad_enabled() and given["labels"] is not None:
            hidden_states = self._predicted(hidden_states, given)
        return super()._postprocess(hidden_states, **given | {"mtp_in_postprocess": False})

    def _predicted(self, hidden_states: Tensor, given: dict[str, Any]) -> Tensor:
        row = given["packed_seq_params"]
        names = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb")
        states = self.mtp(
            hidden_states=hidden_states,
            embedding=self.embedding,
            packed_seq_params=row,
            **{name: given[name] for name in names},
        )
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        predictions = _predictions(row, len(states))
        for number, (state, prediction) in enumerate(zip(states, predictions, strict=True)):
            ids = prediction.labels.view(-1, 1)
            outputs = self.output_layer(state, weight, ids=ids, completes_gradient=False)
            weights = prediction.weights.view(-1).to(outputs.log_probs.dtype)
            losses = weighted_losses(-outputs.log_probs.view(-1), weights)
            sums = torch.stack([losses.detach().sum(), weights.sum()])
            self.prediction_sums[number] += sums
            scaled = self.prediction_scales[number].to(losses.dtype) * losses
            hidden_states = MTPLossAutoScaler.apply(hidden_states, scaled)
        return hidden_states


def add_predictions(
    model: GPTModel,
    config: TransformerConfig,
    spec: MultiTokenPredictionBlockSubmodules,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Give the last stage of a model the layers that predict further tokens.

    They embed tokens, for which a stage after the first gets an embedding; that of a tied model has
    the weight of the output layer.

    Args:
        model: a `PackedGPTModel`.
        config: of the stage.
        spec: of the layers.
        pg_collection: of the stage.
    """
    config = copy.copy(config)
    config.mtp_num_layers = len(spec.layer_specs or ())
    if config.recompute_method == "uniform":
        config.recompute_num_layers = 1  # upstream's layers know no other number
    model.mtp = PredictionBlock(config=config, spec=spec, pg_collection=pg_collection)
    if not model.pre_process:
        model.embedding = LanguageModelEmbedding(
            config=config,
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            position_embedding_type=model.position_embedding_type,
            tp_group=pg_collection.tp,
        )
        weight: Any = model.embedding.word_embeddings.weight
        weight.is_embedding_or_output_parameter = True
        if model.share_embeddings_and_output_weights:
            # Both modules wait for it where it is gathered.
            weight = model.embedding.word_embeddings.weight = model.output_layer.weight
            model.output_layer.is_embedding = True
            weight.zero_out_wgrad = True  # it has a real gradient besides the output layer's
    model.mtp_process = True
    model.__class__ = PredictingGPTModel


def begin_predictions(
    role: RoleModel | None,
    batches: Sequence[PackedBatch],
    config: TransformerConfig,
    device: torch.device,
) -> None:
    """Collective: set by what the losses of predictions enter the gradient, and clear their sums.

    Args:
        role: this rank's; None where idle.
        batches: as for `run_micro_batches`.
        config: of the whole model, which has layers of multi-token prediction.
    """
    num_layers = config.mtp_num_layers or 0
    sums = torch.zeros(1 + num_layers, dtype=torch.float64, device=device)
    if role is not None and role.reports_loss:
        for batch in batches:
            rows = batch.weights, *(each.weights for each in batch.predictions)
            sums += torch.stack([row.sum(dtype=torch.float64) for row in rows])
    dist.all_reduce(sums)
    if role is not None and isinstance(role.model, PredictingGPTModel):
        factor = (config.mtp_loss_scaling_factor or 0.0) / num_layers
        # Layers that predict nothing have no loss to scale.
        role.model.prediction_scales = factor * sums[0] / sums[1:].where(sums[1:] > 0, 1.0)
        role.model.prediction_sums = sums.new_zeros(num_layers, 2)
