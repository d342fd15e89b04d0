"""Staging buffers: memory that buckets pass through on their way, taken once and kept."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Flat buffers that grow to the largest bucket and then serve every bucket and strategy.

    Allocating anew for every bucket costs a page fault a page on a CPU, about as long as the copy
    itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, purpose: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of undefined contents, the caller's until the next one of that purpose.

        Args:
            purpose: buffers of different purposes never overlap.
            num_elements: how many are needed now.
            dtype: of the elements.
        """
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < num_elements:
            buffer = torch.empty(num_elements, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer[:num_elements]
