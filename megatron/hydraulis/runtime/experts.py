"""Routers that balance the load of experts in ways that do not depend on packing.

Upstream's balancing losses are means over a packed row. Those here are sums over tokens that are
not padding: a sequence's loss is weighted by its tokens, and counts of a sequence are added over
the tp and cp ranks that share it. The engine gives the factor by which they enter the gradient,
so that they are normalised by the tokens of the global batch: see `RuntimeEngine.forward_backward`.

Biases of routers follow the load of experts in all of the job's tokens since the last update.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as upstream
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.data.packed_batch import part_places
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import widened
from megatron.hydraulis.runtime.outcome import RoutingFigures
from megatron.hydraulis.runtime.packed_rows import PackedRow, once_a_row
from megatron.hydraulis.runtime.process_groups import to_device


def balances(config: TransformerConfig) -> bool:
    """True if routers add losses to that of the tokens."""
    has_experts = config.num_moe_experts is not None
    return has_experts and bool(_coefficient(config) or config.moe_z_loss_coeff)


def hand_rows_to_routers(model: torch.nn.Module) -> None:
    """Give the routers of a model each row while its layer runs, recomputation included.

    Afterwards upstream's dispatcher would keep places and weights of the row's tokens, and by these
    a graph with, under full recompute, the layer's input and its gradient.
    """
    for layer in model.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(router, SequenceRouter):
            layer.register_forward_pre_hook(partial(_hand_row, router), with_kwargs=True)
            layer.register_forward_hook(partial(_drop_row, router))


def add_biases_once(model: torch.nn.Module, tp: int) -> None:
    """Let each of ``tp`` ranks that cut the experts of a model add its share of their biases.

    Upstream adds the whole bias of an expert's last layer on every rank, before the sum over them,
    and, without tp, to a tensor that autograd does not let it change.
    """
    for layer in model.modules():
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        for expert in getattr(experts, "local_experts", (experts,)):
            if expert is not None:
                expert.linear_fc2.register_forward_hook(partial(_share_of_bias, tp))


def _share_of_bias(tp: int, layer: Any, inputs: Any, outputs: Any) -> Any:
    output, bias = outputs
    if isinstance(bias, list):  # of grouped layers
        return output, [each / tp for each in bias]
    return (output.clone(), bias) if tp == 1 else (output, bias / tp)


_KEPT_BY_DISPATCHERS = ("sort_input_by_local_experts", "restore_output_by_local_experts")
"""Tensors of a dispatcher that do not depend on the row."""


def _hand_row(router: SequenceRouter, layer: Any, inputs: Any, named: dict[str, Any]) -> None:
    router.row = named.get("packed_seq_params")


def _drop_row(router: SequenceRouter, layer: Any, inputs: Any, outputs: Any) -> None:
    router.row = None
    dispatcher = layer.mlp.token_dispatcher
    for name, value in vars(dispatcher).items():
        if isinstance(value, Tensor) and name not in _KEPT_BY_DISPATCHERS:
            setattr(dispatcher, name, None)


def _coefficient(config: TransformerConfig) -> float:
    coefficient: Any = config.moe_aux_loss_coeff
    return 0.0 if config.moe_router_load_balancing_type == "none" else coefficient


class RouterState:
    """State that all routers share: biases, and sums over the tokens since the last update.

    A rank has the rows of all layers, so no strategy moves them; those of multi-token prediction
    follow the others. Those of layers without experts stay 0.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        assert config.num_moe_experts is not None
        shape = (config.num_layers + (config.mtp_num_layers or 0), config.num_moe_experts)
        self._config = config
        self.sums = torch.zeros(math.prod(shape) + 2, dtype=torch.float64, device=device)
        """This rank's sums, flat: losses and counts."""
        self.counts = self.sums[2:].view(shape)
        """(layers, experts): how often tokens that are not padding chose an expert."""
        self.balancing_loss, self.z_loss = self.sums[:2].split(1)
        """Sums over tokens and layers, without coefficients."""
        self.biases: Tensor | None = None
        """(layers, experts), in fp32 as upstream's; None in a model without them."""
        if config.moe_router_enable_expert_bias:
            self.biases = torch.zeros(shape, dtype=torch.float32, device=device)
        self._proposed: Tensor | None = None
        """The biases after the update about which ranks decide."""

    def attach(self, model: torch.nn.Module) -> None:
        """Let the routers of a model use the biases, and add to the sums.

        Raises ConfigurationError for a router whose losses and biases would depend on packing.
        """
        for name, router in model.named_modules():
            if isinstance(router, SequenceRouter):
                router.state = self
                if self.biases is not None:
                    router.expert_bias = self.biases[router.layer]
            elif isinstance(router, upstream.TopKRouter):
                raise ConfigurationError(
                    "routers balance experts independently of packing, as SequenceRouter does, "
                    f"but {name} is a {type(router).__name__}; use "
                    f"{SequenceRouter.__module__}.SequenceRouter or a subclass"
                )

    def forget(self) -> None:
        """Begin the sums of the next update."""
        self.sums.zero_()

    def propose(self, sums: Tensor) -> Tensor:
        """Move each bias by the update rate towards equal loads of a layer's experts (arXiv
        2408.15664), in a copy until `accept`.

        Args:
            sums: those of all ranks, added up.

        Returns:
            In fp64, smallest and largest bias; empty without biases.
        """
        if self.biases is None:
            return sums.new_empty(0)
        counts = sums[2:].view_as(self.counts)
        # Whole numbers, so the sign is exact.
        missing = counts.sum(dim=1, keepdim=True) - counts.shape[1] * counts
        rate = self._config.moe_router_bias_update_rate
        self._proposed = self.biases.add(missing.sign().to(self.biases.dtype), alpha=rate)
        return torch.stack(self._proposed.aminmax()).double()

    def accept(self, host: Tensor) -> RoutingFigures | None:
        """Use the proposed biases.

        Args:
            host: the sums that were proposed and what `propose` returned, on the host.

        Returns:
            Their figures; None where no token has trained.
        """
        if self.biases is not None and self._proposed is not None:
            self.biases.copy_(self._proposed)
        config = self._config
        num_sums = len(self.sums)
        counts = host[2:num_sums].view_as(self.counts)
        counts = counts[counts.any(dim=1)]
        if not len(counts):
            return None
        loads = counts.amax(dim=1) / counts.mean(dim=1)
        num_routed = counts.sum() / config.moe_router_topk  # tokens times layers
        losses = (host[:2] / num_routed).tolist()
        low_and_high = host[num_sums:].tolist()
        return RoutingFigures(
            worst_load=loads.amax().item(),
            balancing_loss=losses[0] if _coefficient(config) else None,
            z_loss=losses[1] if config.moe_z_loss_coeff else None,
            bias_range=(low_and_high[0], low_and_high[1]) if low_and_high else None,
        )


class SequenceRouter(upstream.TopKRouter):
    """Upstream's router with its balancing loss per sequence, and its z-loss without padding."""

    row: PackedRow | None = None
    state: RouterState | None = None
    """Routers in the models of an engine have one."""

    @property
    def layer(self) -> int:
        """The layer's index in the model."""
        number: int = self.layer_number
        return number - 1

    def is_aux_loss_enabled(self) -> bool:
        """Returns False: upstream's losses would depend on packing."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The logits, (tokens, experts); their backward adds that of the z-loss."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self._trains:
            return logits
        is_real, _ = self._tokens(len(logits))
        loss = (torch.logsumexp(widened(logits), dim=-1).square() * is_real.squeeze(1)).sum()
        if self.state is not None:
            self.state.z_loss += loss.detach()
        scaled: Tensor = upstream.MoEAuxLossAutoScaler.apply(logits, coefficient * loss)
        return scaled

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Upstream's weights and choices; the backward of the former adds that of the loss."""
        weights, chosen = super().routing(logits, padding_mask)
        coefficient = _coefficient(self.config)
        if coefficient and self._trains and self._row.sequence_lengths:
            loss = self._sequence_loss(logits.view(-1, logits.shape[-1]))
            if self.state is not None:
                self.state.balancing_loss += loss.detach()
            weights = upstream.MoEAuxLossAutoScaler.apply(weights, coefficient * loss)
        return weights, chosen

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the choices, (tokens, experts), with biases or without."""
        if self.state is not None and self._trains:
            is_real, _ = self._tokens(len(routing_map))
            self.state.counts[self.layer] += (routing_map & is_real).sum(dim=0)

    def _sequence_loss(self, logits: Tensor) -> Tensor:
        """Σ over sequences of tokens · experts · Σ over experts of the share of choices times the
        mean score: upstream's loss (arXiv 2101.03961, eq. 4) of each sequence."""
        chosen, scores = upstream.compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function
        )
        _, numbers = self._tokens(len(logits))
        row = self._row
        num_sequences = len(row.sequence_lengths)
        counts = scores.new_zeros(num_sequences + 1, scores.shape[-1])
        with torch.no_grad():
            counts.index_add_(0, numbers, chosen.to(scores.dtype))
            counts[num_sequences] = 0  # of padding
            of_sequences = counts[:num_sequences]
            for group in (self.tp_group, row.cp_group):
                if group is not None and group.size() > 1:
                    dist.all_reduce(of_sequences, group=group)
            of_sequences /= of_sequences.sum(dim=1, keepdim=True)  # tokens times top-k
        return scores.shape[-1] * (scores * counts.index_select(0, numbers)).sum()

    def _tokens(self, num_local: int) -> tuple[Tensor, Tensor]:
        """(tokens, 1) whether each of this tp rank's tokens is none of padding, and (tokens,) the
        number of its sequence in the row, which for padding is the number of sequences."""
        row = self._row
        begin = self.tp_group.rank() * num_local

        def compute() -> tuple[Tensor, Tensor]:
            group = row.cp_group
            size, rank = (1, 0) if group is None else (group.size(), group.rank())
            found = part_places(row.sequence_lengths, row.segment_lengths, size, rank)
            places, of_places = (torch.from_numpy(each) for each in found[:2])
            is_here = (places >= begin) & (places < begin + num_local)
            numbers = torch.full((num_local,), len(row.sequence_lengths))
            numbers[places[is_here] - begin] = of_places[is_here]
            is_real = (numbers < len(row.sequence_lengths)).unsqueeze(1)
            device = self.weight.device
            return to_device(is_real, device), to_device(numbers, device)

        return once_a_row(row, "routed tokens", compute)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @property
    def _row(self) -> PackedRow:
        assert self.row is not None
        return self.row
