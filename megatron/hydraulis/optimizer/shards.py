"""This rank's canonical shards: master parameters and gradients, flat, bucket after bucket.

Frozen parameters are apart, in the dtype in which the model computes, and have nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout


@dataclass(frozen=True)
class OwnedRectangle:
    """Rows of one piece that this rank owns, and their place in the flat shards."""

    parameter: int
    shard_offset: int
    first_row: int
    """Its row in the whole parameter as a matrix; ``first_column`` is its column."""
    first_column: int
    num_rows: int
    num_columns: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns


class CanonicalShards:
    """The slice of the model that this rank owns, independent of the strategy.

    Args:
        dtype: of master parameters, gradients and optimizer state; fp32, or fp64 in tests.
        frozen_dtype: of frozen parameters.
        has_gradients: whether there is memory for them; otherwise `gradients` is empty until it
            is set to memory of as many elements as there are parameters.
    """

    def __init__(
        self,
        layout: CanonicalLayout,
        rank: int,
        *,
        dtype: torch.dtype,
        frozen_dtype: torch.dtype,
        device: torch.device,
        has_gradients: bool = True,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self._offsets: list[int] = []
        num_elements = {False: 0, True: 0}  # by whether they are frozen
        for bucket in layout.buckets:
            start, stop = bucket.shard_range(rank)
            self._offsets.append(num_elements[bucket.unit.is_frozen])
            num_elements[bucket.unit.is_frozen] += stop - start
        self.parameters = torch.zeros(num_elements[False], dtype=dtype, device=device)
        """Those that are trained."""
        self.frozen = torch.zeros(num_elements[True], dtype=frozen_dtype, device=device)
        num_gradients = num_elements[False] if has_gradients else 0
        self.gradients = torch.zeros(num_gradients, dtype=dtype, device=device)

    def offset(self, bucket: int) -> int:
        """First element of a bucket in the flat shards, or in the frozen ones."""
        return self._offsets[bucket]

    def bucket_parameters(self, bucket: Bucket) -> Tensor:
        """The owned part of a bucket's parameters, flat."""
        return self._owned(self.frozen if bucket.unit.is_frozen else self.parameters, bucket)

    def bucket_gradients(self, bucket: Bucket) -> Tensor:
        """The owned part of a trained bucket's gradients, flat."""
        return self._owned(self.gradients, bucket)

    def _owned(self, flat: Tensor, bucket: Bucket) -> Tensor:
        start, stop = bucket.shard_range(self.rank)
        offset = self._offsets[bucket.index]
        return flat[offset : offset + stop - start]

    def rectangles(self, *, frozen: bool = False) -> Iterator[OwnedRectangle]:
        """Yields what is owned, in the order of the flat shards: whole rows of atoms.

        frozen: of `frozen` instead of `parameters`.
        """
        for bucket in self.layout.buckets:
            if bucket.unit.is_frozen == frozen:
                yield from self.rectangles_of(bucket)

    def rectangles_of(self, bucket: Bucket) -> Iterator[OwnedRectangle]:
        """Yields what is owned of a bucket, in the order of the flat shards."""
        start, stop = bucket.shard_range(self.rank)
        base = self._offsets[bucket.index] - start
        for piece, offset in zip(bucket.pieces, bucket.piece_offsets, strict=False):
            first = max(start, offset)
            last = min(stop, offset + piece.num_elements)
            if first >= last:
                continue
            row, column = self.layout.global_rectangle(piece)
            yield OwnedRectangle(
                parameter=piece.parameter,
                shard_offset=base + first,
                first_row=row + (first - offset) // piece.row_length,
                first_column=column,
                num_rows=(last - first) // piece.row_length,
                num_columns=piece.row_length,
            )
