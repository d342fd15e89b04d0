"""How much memory a rank takes at most, and how much it may take."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Protocol

import torch

__all__ = ["CpuMemory", "CudaMemory", "MemoryMeter"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_RESET_PEAK = "5"
"""Linux, proc(5): resets the peak resident set size to the present one."""
_BYTES_PER_KIB = 1024
SHARE_OF_FREE_MEMORY = 0.9
"""Of the memory that is free when profiling begins, what ranks may take: the rest is for what the
machine does beside it."""


class MemoryMeter(Protocol):
    """Peak memory of this process."""

    def restart(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_bytes(self) -> int:
        """Most since `restart`."""
        ...


class CudaMemory:
    """What torch has allocated on the current device."""

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated())


class CpuMemory:
    """Resident memory of the process, interpreter included.

    Where the system does not let it be reset (not Linux), the peak is that of the whole process.
    """

    def restart(self) -> None:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return

    def peak_bytes(self) -> int:
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        except OSError:
            found = None
        if found is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
        return int(found.group(1)) * _BYTES_PER_KIB


def free_share_bytes(num_ranks_of_node: int) -> int | None:
    """Of a CPU machine's free memory, what each rank may take; None where it is not told."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
    except OSError:
        return None
    if found is None:
        return None
    return int(SHARE_OF_FREE_MEMORY * int(found.group(1)) * _BYTES_PER_KIB / num_ranks_of_node)
