"""Packed rows: what the layers know of one, and how the ranks that share one exchange its parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron.hydraulis.data.packed_batch import gathered_places, local_stretches
from megatron.hydraulis.runtime.process_groups import to_device


@dataclass
class PackedRow(PackedSeqParams):
    """Upstream's description of a packed row, with what the host knows of it already.

    Upstream reads the same from ``cu_seqlens``, and waits for the device each time.
    """

    positions: Tensor | None = None
    """(T,) int64: the position of each token of this rank in its sequence."""
    segment_lengths: tuple[int, ...] = ()
    """Lengths in tokens of the segments of the whole row, padding included."""
    sequence_lengths: tuple[int, ...] = ()
    """Lengths of the sequences, which are the first segments, without padding."""


def segment_lengths(packed_seq_params: PackedSeqParams) -> tuple[int, ...]:
    """Padded lengths of the whole row, even where this rank holds a part of it.

    Padding is at the end of a segment, so causality hides it from the other tokens. The host waits
    for the device unless the description is a `PackedRow`.
    """
    if isinstance(packed_seq_params, PackedRow) and packed_seq_params.segment_lengths:
        return packed_seq_params.segment_lengths

    def read() -> tuple[int, ...]:
        return tuple(borders_of(packed_seq_params).diff().tolist())

    return once_a_row(packed_seq_params, "segment lengths", read)


def borders_of(packed_seq_params: PackedSeqParams) -> Tensor:
    """(segments + 1,) int32: cumulative padded lengths of the whole row, from 0."""
    padded = packed_seq_params.cu_seqlens_q_padded
    borders: Tensor = packed_seq_params.cu_seqlens_q if padded is None else padded
    return borders


def once_a_row[Value](
    packed_seq_params: PackedSeqParams | SharedRow, key: Hashable, compute: Callable[[], Value]
) -> Value:
    """A value that all layers need for a row, computed by the first and cached in its description.

    Args:
        packed_seq_params: describes one micro-batch; not reused for another.
        key: of the value.
        compute: the value.
    """
    cache: dict[Hashable, Value] = vars(packed_seq_params).setdefault("hydraulis_row_cache", {})
    if key not in cache:
        cache[key] = compute()
    return cache[key]


Stretch = tuple[int, int, int]
"""Consecutive queries in a segment: its index, and begin and end of the queries in it."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """The stretches of this rank's queries, each with the keys up to its end."""

    keys: list[tuple[int, int, int]]
    """Of each stretch: segment, and begin and end of the keys in it."""
    num_queries: list[int]
    num_keys: list[int]
    query_borders: Tensor
    """(stretches + 1,) int32: cumulative numbers of queries, from 0."""
    key_borders: Tensor
    """(stretches + 1,) int32: cumulative numbers of keys, from 0."""


@dataclass(frozen=True, eq=False)
class SharedRow:
    """What every layer needs for a row that a group shares; computed once per micro-batch."""

    group: dist.ProcessGroup
    size: int
    """Ranks of the group, c."""
    lengths: tuple[int, ...]
    """Of the segments of the whole row, padding included, in tokens."""
    borders: Tensor
    """(segments + 1,) int32: cumulative lengths, from 0."""
    by_place: Tensor
    """(R,) int64: index that reorders parts by rank into the row."""
    by_rank: Tensor
    """(R,) int64: index that reorders the row into parts by rank."""
    stretches: tuple[Stretch, ...]
    """This rank's tokens in their order."""

    def attended(self, window: int | None) -> Stretches:
        """The keys of each stretch; computed once for all layers with this window."""
        return once_a_row(self, ("stretches", window), lambda: self._attended(window))

    def _attended(self, window: int | None) -> Stretches:
        keys = [
            (segment, 0 if window is None else max(0, start - window), stop)
            for segment, start, stop in self.stretches
        ]
        num_queries = [stop - start for _, start, stop in self.stretches]
        num_keys = [stop - first for _, first, stop in keys]
        sums = np.cumsum([[0, *num_queries], [0, *num_keys]], axis=1, dtype=np.int32)
        borders = to_device(torch.from_numpy(sums), self.by_rank.device)
        return Stretches(keys, num_queries, num_keys, borders[0], borders[1])


def context_size_of(packed_seq_params: PackedSeqParams) -> int:
    """Ranks that share the row; 1 without a group."""
    group = packed_seq_params.cp_group
    return 1 if group is None else int(group.size())


def shared_row(packed_seq_params: PackedSeqParams, query: Tensor) -> SharedRow:
    """The `SharedRow` of a row whose ``cp_group`` has several ranks; ``query`` of any layer."""

    def make() -> SharedRow:
        lengths = segment_lengths(packed_seq_params)
        group = packed_seq_params.cp_group
        size = group.size()
        by_rank = gathered_places(lengths, size)
        places = to_device(torch.from_numpy(np.stack([by_rank, by_rank.argsort()])), query.device)
        return SharedRow(
            group=group,
            size=size,
            lengths=lengths,
            borders=borders_of(packed_seq_params),
            by_place=places[1],
            by_rank=places[0],
            stretches=tuple(
                (segment, start, stop)
                for segment, length in enumerate(lengths)
                for start, stop in local_stretches(length, size, group.rank())
            ),
        )

    return once_a_row(packed_seq_params, "shared row", make)


def gather_row(part: Tensor, row: SharedRow) -> Tensor:
    """(T, …) of every rank into (R, …) in the order of the row. Collective, also in the backward,
    which adds up gradients and returns this rank's part."""
    gathered: Tensor = _Gather.apply(part, row)
    return gathered


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, row: SharedRow) -> Tensor:
        ctx.row = row
        return gathered_again(part, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        row: SharedRow = ctx.row
        part = gradient.new_empty(gradient.size(0) // row.size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.index_select(0, row.by_rank), group=row.group)
        return part, None


def gathered_again(part: Tensor, row: SharedRow) -> Tensor:
    """The values of `gather_row`, without autograd. Collective."""
    parts = part.new_empty(row.size * part.size(0), *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=row.group)
    return parts.index_select(0, row.by_place)


class HeadExchange(Function):
    """(T, c, heads of a rank, size) into (R, heads of this rank, size) in the order of the row, or
    back."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, row: SharedRow, scatters: bool) -> Tensor:
        ctx.row, ctx.scatters = row, scatters
        return _scatter_heads(given, row) if scatters else _gather_heads(given, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inverse = _gather_heads if ctx.scatters else _scatter_heads
        return inverse(gradient, ctx.row), None, None


def _scatter_heads(shares: Tensor, row: SharedRow) -> Tensor:
    sent = shares.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=row.group)
    return received.flatten(0, 1).index_select(0, row.by_place)


def _gather_heads(whole: Tensor, row: SharedRow) -> Tensor:
    sent = whole.index_select(0, row.by_rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=row.group)
    return received.unflatten(0, (row.size, -1)).transpose(0, 1)
