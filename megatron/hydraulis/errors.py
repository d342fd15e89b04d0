"""Every exception this package raises on purpose.

A message states the rule that was broken, the numbers that broke it, and the fix, for example
``strategy 'long': 3 replicas use 20 ranks but the job has 16; remove a replica or start 20 ranks``.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that writes to a full disk, or beyond a quota, raise."""


class HydraulisError(Exception):
    """Base of all errors of this package; its message is shown to the user."""

    is_shared = False
    """Whether every rank of the job raises it."""


class ConfigurationError(HydraulisError):
    """Flags or settings that contradict each other or the job."""


class StrategyError(ConfigurationError):
    """A strategy that cannot be read, cannot be placed on the ranks or does not fit the model."""


class PlanError(HydraulisError):
    """An invalid iteration plan, or a batch that no strategy of the pool can hold."""


class DataError(HydraulisError):
    """A corpus, index, tokenizer or vocabulary that is damaged or does not fit the job."""


class CheckpointError(HydraulisError):
    """A checkpoint that is damaged, incomplete or cannot be written."""


class NonFiniteLossError(HydraulisError):
    """The loss or the gradient norm became NaN or infinite."""


class OutOfMemoryError(HydraulisError):
    """Memory ran out, and the run cannot go on with smaller micro-batches."""


class UpstreamVersionError(HydraulisError):
    """The installed megatron-core is not a version that ``hydraulis_patches`` knows."""


def listed[Item](items: Sequence[Item], *, most: int = 4, text: Callable[[Item], str] = str) -> str:
    """The first few of many, as text, and how many more there are, for an error."""
    named = ", ".join(map(text, items[:most]))
    return f"{named} and {len(items) - most} more" if len(items) > most else named


def why_not_written(error: OSError, path: str | Path) -> str:
    """The reason for a message about a file; if the disk is full, with the bytes that are free."""
    reason = error.strerror or str(error)
    if error.errno in FULL_DISK:
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(Path(path).parent).free
            reason += f" ({free_bytes:,} bytes are free in {Path(path).parent})"
    return reason
