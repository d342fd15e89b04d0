"""Staging buffers: memory that buckets pass through on their way, taken once and kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError

DEFAULT_NUM_SLOTS = 2
"""One bucket is copied while the next one travels."""

_ALIGNMENT_BYTES = 256


class StagingSlot:
    """Buffers for one bucket on its way; they grow to the largest bucket and then serve all.

    Allocating anew for every bucket costs a page fault a page on a CPU, about as long as the copy
    itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, purpose: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of undefined contents, the caller's until the next one of that purpose.

        Args:
            purpose: buffers of different purposes never overlap; of different dtypes they do.
            num_elements: how many are needed now.
            dtype: of the elements.
        """
        num_bytes = num_elements * dtype.itemsize
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers.pop(purpose, None)  # the old one first: never both at a time
            size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            del buffer
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._buffers[purpose] = buffer
        return buffer[:num_bytes].view(dtype)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(buffer.numel() for buffer in self._buffers.values())


class Staging:
    """The slots of a rank: as many buckets may be rearranged at a time.

    Args:
        device: where buffers live.
        num_slots: at least 1.
    """

    def __init__(self, device: torch.device, num_slots: int = DEFAULT_NUM_SLOTS) -> None:
        if num_slots < 1:
            raise ConfigurationError(
                f"regrouping needs at least 1 staging slot but gets {num_slots}; give 1 or more"
            )
        self.slots: Sequence[StagingSlot] = tuple(StagingSlot(device) for _ in range(num_slots))

    @property
    def num_bytes(self) -> int:
        """Memory in use over all slots."""
        return sum(slot.num_bytes for slot in self.slots)
