"""Routers that balance the load of experts by losses which do not depend on packing.

Upstream's balancing losses are means over a packed row. Those here are sums over tokens that are
not padding: a sequence's loss is weighted by its tokens, and counts of a sequence are added over
the tp and cp ranks that share it. The engine gives the factor by which they enter the gradient,
so that they are normalised by the tokens of the global batch: see `Engine.forward_backward`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as upstream
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.data.packed_batch import part_places
from megatron.hydraulis.runtime.attention import PackedRow, once_a_row


def balances(config: TransformerConfig) -> bool:
    """Whether routers add losses to that of the tokens."""
    has_experts = config.num_moe_experts is not None
    return has_experts and bool(_coefficient(config) or config.moe_z_loss_coeff)


def hand_rows_to_routers(model: torch.nn.Module) -> None:
    """Give the routers of a model each row before its layer runs, recomputation included."""
    for layer in model.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(router, SequenceRouter):
            layer.register_forward_pre_hook(partial(_hand_row, router), with_kwargs=True)


def _hand_row(router: SequenceRouter, layer: Any, inputs: Any, named: dict[str, Any]) -> None:
    router.row = named.get("packed_seq_params")


def _coefficient(config: TransformerConfig) -> float:
    coefficient: Any = config.moe_aux_loss_coeff
    return 0.0 if config.moe_router_load_balancing_type == "none" else coefficient


class SequenceRouter(upstream.TopKRouter):
    """Upstream's router with its balancing loss per sequence, and its z-loss without padding."""

    row: PackedRow | None = None

    def is_aux_loss_enabled(self) -> bool:
        """False: upstream's losses would depend on packing."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The logits, (tokens, experts); their backward adds that of the z-loss."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self._trains:
            return logits
        places, _ = self._tokens(len(logits))
        losses = torch.logsumexp(_wide(logits[places]), dim=-1).square()
        loss: Tensor = upstream.MoEAuxLossAutoScaler.apply(logits, coefficient * losses.sum())
        return loss

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Upstream's weights and choices; the backward of the former adds that of the loss."""
        weights, chosen = super().routing(logits, padding_mask)
        coefficient = _coefficient(self.config)
        if coefficient and self._trains and self._row.sequence_lengths:
            loss = coefficient * self._sequence_loss(logits.view(-1, logits.shape[-1]))
            weights = upstream.MoEAuxLossAutoScaler.apply(weights, loss)
        return weights, chosen

    def _sequence_loss(self, logits: Tensor) -> Tensor:
        """Σ over sequences of tokens · experts · Σ over experts of the share of choices times the
        mean score: upstream's loss (arXiv 2101.03961, eq. 4) of each sequence."""
        chosen, scores = upstream.compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function
        )
        places, numbers = self._tokens(len(logits))
        scores, row = scores[places], self._row
        counts = scores.new_zeros(len(row.sequence_lengths), scores.shape[-1])
        with torch.no_grad():
            counts.index_add_(0, numbers, chosen[places].to(scores.dtype))
            for group in (self.tp_group, row.cp_group):
                if group is not None and group.size() > 1:
                    dist.all_reduce(counts, group=group)
            counts /= counts.sum(dim=1, keepdim=True)  # of a sequence, tokens times top-k
        return scores.shape[-1] * (scores * counts[numbers]).sum()

    def _tokens(self, num_local: int) -> tuple[Tensor, Tensor]:
        """Places among this tp rank's tokens of those that are not padding, and the numbers of
        their sequences in the row."""
        row = self._row
        begin = self.tp_group.rank() * num_local

        def compute() -> tuple[Tensor, Tensor]:
            group = row.cp_group
            size, rank = (1, 0) if group is None else (group.size(), group.rank())
            found = part_places(row.sequence_lengths, row.segment_lengths, size, rank)
            places, numbers = (torch.from_numpy(each) for each in found[:2])
            is_here = (places >= begin) & (places < begin + num_local)
            device = self.weight.device
            return (places[is_here] - begin).to(device), numbers[is_here].to(device)

        return once_a_row(row, "routed tokens", compute)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @property
    def _row(self) -> PackedRow:
        assert self.row is not None
        return self.row


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
