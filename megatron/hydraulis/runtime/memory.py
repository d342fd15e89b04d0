"""Memory of a rank: measured, and run out of.

Where memory runs out, a replica of one rank can recover: it communicates with nobody while it
computes, except for regrouping. It throws its micro-batches away and takes part in the rest of the
iteration; the others learn of it with the loss, and nobody updates. In a replica of several ranks
the others wait in a collective that this rank will never enter; with NCCL only the end of the
process ends that, and the launcher ends the job.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.strategy import Scheme, Strategy

HEADROOM_SHARE = 0.03
"""Share of a device's memory that planned micro-batches leave free, because packs of other lengths
leave other fragments."""
SHARE_OF_FREE_MEMORY = 0.9
"""Share of a machine's free memory that the ranks on its CPU may take; the rest is for other
programs."""

_BYTES_PER_GIB = 2**30
_BYTES_PER_KIB = 1024
_RESET_PEAK = "5"
"""Text for clear_refs (Linux, proc(5)) that sets the peak resident set size to the present."""
_NO_MEMORY_ON_CPU = "can't allocate memory"
"""Part of the message of torch's CPU allocator."""


class MemoryMeter(Protocol):
    """Memory that this rank uses, and how much it may use."""

    def restart(self) -> int:
        """Forget the peak so far; returns the bytes in use now."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes in use since `restart`."""
        ...

    def capacity_bytes(self) -> int:
        """Most bytes that may be in use."""
        ...


class CudaMemory:
    """The current device: what torch's allocator holds, fragments included, and everything else on
    it, such as communicators and other processes."""

    def restart(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self._other_bytes() + int(torch.cuda.memory_reserved())

    @classmethod
    def peak_bytes(cls) -> int:
        torch.cuda.synchronize()
        return cls._other_bytes() + int(torch.cuda.max_memory_reserved())

    def capacity_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1] * (1 - HEADROOM_SHARE))

    @staticmethod
    def _other_bytes() -> int:
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - int(torch.cuda.memory_reserved()))


class CpuMemory:
    """Resident memory of this process, interpreter included.

    Where the system does not allow a reset (not Linux), the peak is that of the process so far;
    where it does not report its free memory, there is no limit.
    """

    def __init__(self, num_ranks_of_node: int) -> None:
        free_bytes = _kib_entry_bytes(Path("/proc/meminfo"), "MemAvailable")
        self._capacity_bytes = sys.maxsize
        if free_bytes is not None:
            share_bytes = int(SHARE_OF_FREE_MEMORY * free_bytes / num_ranks_of_node)
            self._capacity_bytes = self.restart() + share_bytes

    def restart(self) -> int:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        return self.peak_bytes()

    @staticmethod
    def peak_bytes() -> int:
        peak_bytes = _kib_entry_bytes(Path("/proc/self/status"), "VmHWM")
        if peak_bytes is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
        return peak_bytes

    def capacity_bytes(self) -> int:
        return self._capacity_bytes


def memory_meter(num_ranks_of_node: int) -> MemoryMeter:
    """The meter of this rank's device, which is the CPU where there is no other."""
    return CudaMemory() if torch.cuda.is_available() else CpuMemory(num_ranks_of_node)


def allocator_peaks() -> dict[str, int]:
    """Peaks of torch's allocator since the last call, by field of a record; none without CUDA."""
    if not torch.cuda.is_available():
        return {}
    peaks = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


def release_cached_memory() -> None:
    """Give memory that an abandoned micro-batch held back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _kib_entry_bytes(path: Path, name: str) -> int | None:
    """An entry of a file of Linux's /proc; None where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found.group(1)) * _BYTES_PER_KIB


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Place where a rank ran out of memory."""

    rank: int
    strategy: str
    scheme: Scheme
    """The scheme of the rank's replica."""
    context_size: int
    """Ranks that share the row: those of the wave's group where the scheme splits its cp ranks."""
    micro_batch: int
    """Its number in the rank's replica, from 0."""
    num_tokens: int
    """Tokens of the row on all ranks that share it, padding included."""
    held_bytes: int
    """Most bytes in use on this rank since the last measurement, counted by its `MemoryMeter`."""

    @property
    def group(self) -> Scheme:
        """The scheme whose limit the row exceeded."""
        return self.scheme.of_context_group(self.context_size)

    @property
    def text(self) -> str:
        """A line for an error or the log: which rank ran out of memory, and with what."""
        where = f"{self.scheme}"
        if self.scheme.splits_cp:
            where = f"{self.context_size} cp ranks of {where}"
        return (
            f"rank {self.rank} ran out of memory in micro-batch {self.micro_batch} of strategy "
            f"'{self.strategy}', {self.num_tokens:,} tokens on {where}, with "
            f"{self.held_bytes / _BYTES_PER_GIB:.2f} GiB in use"
        )


class SharedOutOfMemoryError(OutOfMemoryError):
    """Raised on every rank, after all have finished the collectives of the iteration."""

    def __init__(self, own: OutOfMemory | None, num_ranks_without_memory: int) -> None:
        super().__init__(
            f"number of other ranks that ran out of memory: {num_ranks_without_memory}"
            if own is None
            else own.text
        )
        self.own = own
        """This rank's own lack of memory, if it is one of them."""


class LoneOutOfMemoryError(OutOfMemoryError):
    """Raised on one rank, while the others of its replica wait for it."""

    def __init__(self, own: OutOfMemory) -> None:
        super().__init__(
            f"{own.text}; the rest of the replica ({own.scheme}) waits for it, "
            "so this run cannot go on: start it again with a lower "
            "--max-tokens-per-micro-batch, or give the replica more ranks"
        )
        self.own = own


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch found no memory, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY_ON_CPU in str(error)


def recover_from_oom(
    error: BaseException,
    rank: int,
    strategy: Strategy,
    batches: Sequence[PackedBatch],
    num_begun: int,
) -> OutOfMemory:
    """Returns what a rank without memory reports to the others, if it can go on.

    Args:
        batches: this rank's micro-batches.
        num_begun: number of them whose forward began.

    Raises:
        LoneOutOfMemoryError: other ranks of the replica wait for this one.
    """
    mine = strategy.replica_of(rank)
    if mine is None or not batches:
        raise error
    index = max(0, num_begun - 1)
    found = OutOfMemory(
        rank=rank,
        strategy=strategy.name,
        scheme=mine.scheme,
        context_size=batches[index].context_size,
        micro_batch=index,
        num_tokens=batches[index].tokens.size(-1) * batches[index].context_size,
        held_bytes=(CudaMemory if torch.cuda.is_available() else CpuMemory).peak_bytes(),
    )
    if mine.scheme.num_ranks > 1:
        raise LoneOutOfMemoryError(found) from error
    return found
