"""Adapters of low rank in a built model: A and B beside frozen linear layers, and nothing else.

Every tp rank holds every adapter whole and uses those rows of B, or columns of A, that belong to
its part of the layer. A row layer adds its output up over the ranks for both products together.
With sequence parallelism a column layer applies A to the rank's part of its input, which alone is
kept for the backward, and gathers A·x, which has few channels. So a rank has a part of the sum of
every gradient, with and without sequence parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError, listed
from megatron.hydraulis.lora import ADAPTERS, Adapter, Lora
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.runtime.latent_attention import DuplicatedLinear

_NAME = re.compile(r"(?:decoder\.layers\.[0-9]+\.)?(.+)")
"""Matches the name of a module, and what it is inside a layer."""


class LowRank(torch.nn.Module):
    """A, (rank, inputs), and B, (outputs, rank), of one of Hugging Face's linear layers.

    B's rows are in Hugging Face's order. Initial values are peft's: A uniform within
    1 / sqrt(inputs), which is Kaiming's with a = sqrt(5), and B zero.
    """

    def __init__(self, adapter: Adapter, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.empty(rank, adapter.num_inputs, dtype=dtype))
        self.lora_B = torch.nn.Parameter(torch.empty(adapter.num_outputs, rank, dtype=dtype))
        bound = adapter.num_inputs**-0.5
        with torch.no_grad():
            self.lora_A.uniform_(-bound, bound)
            self.lora_B.zero_()
        parameter: Any
        for parameter in self.parameters():
            parameter.hydraulis_contribution = "partial"  # see `catalogue.MARK`


class Adapters(torch.nn.ModuleDict):
    """The adapters of one of Megatron's linear layers, by Hugging Face's names.

    Args:
        parts: what Hugging Face has of the layer, in Megatron's order, adapted or not.
        lora: which of them are adapted, and how.
        linear: the layer, of this tp rank.
    """

    def __init__(self, parts: Sequence[Adapter], lora: Lora, linear: Any) -> None:
        # A tied output layer has no weight where the embedding is in the same stage.
        dtype = linear.config.params_dtype if linear.weight is None else linear.weight.dtype
        super().__init__({each.target: LowRank(each, lora.rank, dtype) for each in lora.of(parts)})
        self.are_used = True
        self._parts = tuple(parts)
        self._lora = lora
        self._tp, self._tp_rank = linear.tp_place
        self._cuts_rows = isinstance(linear, ColumnParallelLinear)
        # Of each query group Megatron stacks all parts; of fc1 each tp rank.
        self._num_stacks = self._tp if self._cuts_rows else 1
        if parts[0].module.endswith(".linear_qkv"):
            self._num_stacks = linear.config.num_query_groups

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Scale · A·x, (…, adapters · rank), and those rows of B that belong to this rank.

        Their product is what is added to the layer's.

        given: x, (…, inputs of this rank).
        """
        return F.linear(given, self._a()) * self._lora.scale, self._b()

    @property
    def _low_rank(self) -> list[Any]:
        return list(self.values())

    def _a(self) -> Tensor:
        """(adapters · rank, inputs of this rank): one product for all of them."""
        whole = torch.cat([each.lora_A for each in self._low_rank])
        return whole if self._cuts_rows else whole.chunk(self._tp, dim=1)[self._tp_rank]

    def _b(self) -> Tensor:
        """(outputs of this rank, adapters · rank) in Megatron's order, 0 where an output is not
        of the adapter: one product for all of them, which adds to the layer's."""
        rank, num_columns = self._lora.rank, self._lora.rank * len(self)
        blocks, first = [], 0
        for part in self._parts:
            if part.target in self:
                own: Any = self[part.target]
                rows = F.pad(own.lora_B, (first, num_columns - first - rank))
                first += rank
            else:
                like = self._low_rank[0].lora_B
                rows = like.new_zeros(part.num_outputs, num_columns)
            blocks.append(rows.unflatten(0, (self._num_stacks, -1)))
        whole = torch.cat(blocks, dim=1).flatten(0, 1)
        return whole.chunk(self._tp)[self._tp_rank] if self._cuts_rows else whole


class Adapted(torch.nn.Module):
    """A linear layer whose weight is frozen, with adapters."""

    adapters: Adapters
    tp_group: Any

    @property
    def tp_place(self) -> tuple[int, int]:
        """The number of tp ranks that share the layer, and this rank's among them."""
        return get_pg_size(self.tp_group), get_pg_rank(self.tp_group)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **named: Any,
    ) -> Tensor:
        """Upstream's product of a parallel layer, before the sum over tp ranks if there is one."""
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        upstream: Any = super()
        product = partial(
            upstream._forward_impl,
            input,
            weight,
            allreduce_dgrad=False,
            sequence_parallel=sequence_parallel,
            **named,
        )
        if not self.adapters.are_used:
            output: Tensor = product()
            return output
        low, rows = self.adapters(input)
        if sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        return _plus_product(product(), low, rows)


class AdaptedColumnParallelLinear(Adapted, ColumnParallelLinear):
    """Uses the rows of B that are its own."""


class AdaptedRowParallelLinear(Adapted, RowParallelLinear):
    """Uses the columns of A that are its own."""


class AdaptedDuplicatedLinear(Adapted, DuplicatedLinear):
    """With sequence parallelism both products are of this rank's part of the sequence."""

    tp_place = (1, 0)

    def forward(self, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        output, _ = super().forward(given)
        if self.adapters.are_used:
            output = _plus_product(output, *self.adapters(given))
        return output, None


class _PlusProduct(torch.autograd.Function):
    """(…, outputs) + (…, rank) · (outputs, rank)ᵀ, in the memory of the first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, rows: Tensor) -> Tensor:
        output.view(-1, output.size(-1)).addmm_(low.flatten(0, -2), rows.t())
        ctx.save_for_backward(low, rows)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, rows = ctx.saved_tensors
        return gradient, gradient @ rows, gradient.flatten(0, -2).t() @ low.flatten(0, -2)


def _plus_product(output: Tensor, low: Tensor, rows: Tensor) -> Tensor:
    result: Tensor = _PlusProduct.apply(output, low, rows)
    return result


_ADAPTED: dict[type, type[Adapted]] = {
    ColumnParallelLinear: AdaptedColumnParallelLinear,
    RowParallelLinear: AdaptedRowParallelLinear,
    DuplicatedLinear: AdaptedDuplicatedLinear,
}


def without_adapters(step: ForwardStep) -> ForwardStep:
    """The forward step of the model below the adapters; for passes without gradients."""

    def plain(data_iterator: Iterator[PackedBatch], model: torch.nn.Module) -> Any:
        found = [module for module in model.modules() if isinstance(module, Adapters)]
        for each in found:
            each.are_used = False
        try:
            return step(data_iterator, model)
        finally:
            for each in found:
                each.are_used = True

    return plain


def adapt(model: torch.nn.Module, lora: Lora, there: Sequence[Adapter]) -> None:
    """Freeze a stage's parameters and give its linear layers adapters.

    Args:
        model: with the linear layers of local layers.
        lora: which of them have an adapter.
        there: every adapter that the model can have.

    Raises:
        ConfigurationError: a layer with an adapter has another type or other sizes.
    """
    model.requires_grad_(False)
    parts_of = {name: list(parts) for name, parts in groupby(there, key=lambda each: each.module)}
    for name, linear in list(model.named_modules()):
        parts = parts_of.get(_NAME.sub(r"\1", name), [])
        if lora.of(parts):
            _adapt(name, linear, parts, lora)


def _adapt(name: str, linear: Any, parts: Sequence[Adapter], lora: Lora) -> None:
    kind = type(linear)
    if kind not in _ADAPTED:
        raise ConfigurationError(
            f"adapters belong to linear layers of {listed([k.__name__ for k in _ADAPTED])} but "
            f"'{name}' is {kind.__name__}; use the local layers, or leave it out of the targets "
            "(--lora-targets)"
        )
    sizes = parts[0].num_inputs, sum(part.num_outputs for part in parts)
    there = (
        (linear.in_features, linear.out_features)
        if kind is DuplicatedLinear
        else (linear.input_size, linear.output_size)
    )
    if sizes != there:
        raise ConfigurationError(
            f"the adapters of '{name}' have {sizes[0]} inputs and {sizes[1]} outputs but it has "
            f"{there[0]} and {there[1]}; leave it out of the targets (--lora-targets)"
        )
    linear.__class__ = _ADAPTED[kind]
    linear.adapters = Adapters(parts, lora, linear)


def check_all_found(names: Sequence[str], lora: Lora) -> None:
    """Raise ConfigurationError unless the whole model's parameters have every kind of adapter."""
    missing = [each for each in lora.targets if not any(f"{ADAPTERS}{each}." in n for n in names)]
    if missing:
        raise ConfigurationError(
            f"every layer of the targets (--lora-targets) is adapted but the model has none for "
            f"{listed(missing)}: its modules have other names than Megatron's; leave them out"
        )
