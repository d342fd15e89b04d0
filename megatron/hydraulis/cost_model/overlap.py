"""What hides behind something else in a micro-batch: a ring's messages, and weights of ``fs``.

What one rank of a ring of c does to the keys and values that it has overlaps with their exchange,
but for the last of c steps: max(attention, exchange + attention/c), in the forward and, with other
figures, in the backward. Other exchanges come before attention and add up.

Weights that cp ranks share are gathered while the layer before computes, and their gradients are
reduce-scattered while the next one does. A pass takes the longer of its compute, with the messages
for which it waits, and all its messages, which share the links. Layers that are still in their
slots are not gathered again: a backward finds the last ones there, and the next forward the first
ones, with embedding and output layer, whose slots are their own. It hides the scatters with which
the backward ends. So what nothing hides is the gathers before the first micro-batch and the
scatters after the last one, which count as regrouping does (`RegroupCosts`).

The sums of all choices are the forms of `Coefficients`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.hydraulis.cost_model.kernels import Operation
from megatron.hydraulis.frozen import StageLayers
from megatron.hydraulis.strategy import Scheme

if TYPE_CHECKING:
    from megatron.hydraulis.cost_model.analytic import AnalyticCostModel

NUM_TP_COLLECTIVES_FORWARD = 4
"""Around attention and around the MLP; the backward has as many."""
# Causes that use links.
_MESSAGES = ("tensor_parallel", "expert_parallel", "context_parallel")


@dataclass(frozen=True, slots=True)
class CostTerm:
    """Seconds of a cause, of a micro-batch on a stage: a polynomial in the lengths."""

    per_token2_s: float = 0.0
    """Times Σ s²."""
    per_token_s: float = 0.0
    """Times Σ s."""
    constant_s: float = 0.0

    def __add__(self, other: CostTerm) -> CostTerm:
        return CostTerm(
            self.per_token2_s + other.per_token2_s,
            self.per_token_s + other.per_token_s,
            self.constant_s + other.constant_s,
        )

    def seconds(self, sum_of_squares: float, num_tokens: float) -> float:
        """Time of a micro-batch."""
        return self.per_token2_s * sum_of_squares + self.per_token_s * num_tokens + self.constant_s

    def __rmul__(self, factor: float) -> CostTerm:
        return CostTerm(
            factor * self.per_token2_s, factor * self.per_token_s, factor * self.constant_s
        )


def hidden_by_stage(model: AnalyticCostModel, scheme: Scheme) -> list[list[CostTerm]]:
    """What each form hides of `AnalyticCostModel.stage_terms`: shape (num_forms, pp)."""
    layers = [model.stage_layers(scheme, stage) for stage in range(scheme.pp)]
    rings, again = list(_by_ring(model, scheme)), model.recompute_of(scheme)
    overlap = model.kernels.overlap

    def num_again(layers: StageLayers) -> int:
        num_layers = layers.number - layers.idle
        return again.num_layers_again(num_layers) + num_layers * again.drops("core_attn")

    if not (scheme.shares_weights and model.fs_prefetch):
        return [
            [
                overlap
                * ((each.number + num_again(each)) * forward + (each.number - each.idle) * backward)
                for each in layers
            ]
            for forward, backward in rings
        ]
    # In each pass compute hides weights, and a ring, or messages hide all compute of the layers.
    (only,) = layers
    in_forward, in_backward = (
        CostTerm(constant_s=messages_s) for messages_s in shared_weights_s(model, scheme)
    )
    forwards = [only.number * ring + in_forward for ring, _ in rings]
    backwards = [
        num_again(only) * ring + (only.number - only.idle) * back + in_backward
        for ring, back in rings
    ]
    compute, compute_back = _compute(model, scheme, only)
    pairs = itertools.product([*forwards, compute], [*backwards, compute_back])
    return [[overlap * (forward + backward)] for forward, backward in dict.fromkeys(pairs)]


def _by_ring(model: AnalyticCostModel, scheme: Scheme) -> Iterator[tuple[CostTerm, CostTerm]]:
    """What is hidden in forward and backward of a layer, in each form."""
    if model.exchange(scheme).way != "p2p":
        yield CostTerm(), CostTerm()
        return
    forward, backward = model.context_terms(scheme)
    # While it attends to all keys and values but those of the last step.
    overlapping = (1.0 - 1.0 / scheme.cp) * model.attention(scheme)
    overlapping_back = model.backward_attentions * overlapping
    yield forward, backward
    yield overlapping, backward
    yield overlapping, overlapping_back


def _compute(
    model: AnalyticCostModel, scheme: Scheme, layers: StageLayers
) -> tuple[CostTerm, CostTerm]:
    """Forward and backward of the layers of the only stage, without messages."""
    again, forward = model.recompute_of(scheme), model.forward_terms(scheme)
    terms = model.stage_terms(scheme, layers, is_last=False)
    in_forward, both = CostTerm(), terms["recompute"]
    messages_again = again.drops("core_attn") * forward["context_parallel"]
    if again.drops("mlp"):
        messages_again += model.tp_collectives(scheme, NUM_TP_COLLECTIVES_FORWARD // 2)
    if again.granularity == "full":
        messages_again = sum((forward[cause] for cause in _MESSAGES), CostTerm())
    for cause, term in forward.items():
        if cause not in _MESSAGES:
            in_forward += layers.number * term
            both += terms[cause]
    num_again = again.num_layers_again(layers.number) or layers.number
    return in_forward, both + -1.0 * (in_forward + num_again * messages_again)


def shared_weights_s(model: AnalyticCostModel, scheme: Scheme) -> tuple[float, float]:
    """Messages of the weights that ranks share, in forward and backward of a micro-batch that
    others precede and follow, in s."""
    shape, num_others = model.shape, model.shape.num_layers - 1
    num_gathered = max(0, num_others - model.fs_prefetch)
    frozen, layers = model.frozen, model.stage_layers(scheme, 0)
    adapters = model.num_adapter_parameters(shape.num_layers) / shape.num_layers

    def of_layer_s(operation: Operation, entry_bytes: int) -> float:
        """Mean over the layers."""
        time_s = 0.0
        for has_experts, number in model.kinds_of_layers.items():
            parts = model.shared_parameters(scheme, has_experts=has_experts)
            parts[scheme.fs] += adapters
            for num_ranks, part in parts.items():
                num_bytes = entry_bytes * part
                time_s += number * _collective_s(model, scheme, operation, num_ranks, num_bytes)
        return time_s / shape.num_layers

    def scattered_s(num_parameters: float) -> float:
        """Of gradients that all these ranks share."""
        num_bytes = model.gradient_bytes * num_parameters
        return num_bytes and _collective_s(model, scheme, "reduce_scatter", scheme.fs, num_bytes)

    gathers_s = num_gathered * of_layer_s("all_gather", model.parameter_bytes)
    scatter_s = scattered_s(adapters)
    if layers.trained:
        share = layers.trained / shape.num_layers
        scatter_s += share * of_layer_s("reduce_scatter", model.gradient_bytes)
    of_end_s = scattered_s(shape.num_embedding_parameters / scheme.tp)
    embedding_s = 0.0 if frozen.embedding else of_end_s
    outputs_s = 0.0 if shape.tied_embeddings or frozen.output else of_end_s
    if model.lora is not None:
        outputs_s = scattered_s(model.lora.num_in(model.lora.of_output(shape)))
    in_forward_s = gathers_s + scatter_s + embedding_s
    gathers_s *= 1 - layers.idle / shape.num_layers
    return in_forward_s, gathers_s + num_others * scatter_s + outputs_s


def _collective_s(
    model: AnalyticCostModel,
    scheme: Scheme,
    operation: Operation,
    num_ranks: int,
    num_bytes: float,
) -> float:
    """A collective of num_bytes, in all, over ranks that share weights."""
    kernels, span = model.device.kernels, scheme.tp * scheme.fs
    if kernels is not None and not model.cluster.uses_network(span):
        return kernels.collective_s(model.rates, operation, num_ranks, num_bytes)
    link = model.collective_link(span, span // num_ranks)
    return link.time_s((num_ranks - 1) / num_ranks * num_bytes)
