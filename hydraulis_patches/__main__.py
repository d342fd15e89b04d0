"""`python -m hydraulis_patches`: what is changed in upstream, why, and whether it fits."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from hydraulis_patches.cpu_backend import (
    CPU_BACKEND,
    DISPATCHED_COUNTS,
    GATED_DELTA_NET,
    RNG_STATE,
    RNG_TRACKER,
)
from hydraulis_patches.deferred_compile import JIT_FUSER
from hydraulis_patches.registry import Patch
from hydraulis_patches.training_loop import ALL, MEMORY_BUFFER, MOE_METRICS
from megatron.hydraulis.errors import UpstreamVersionError
from megatron.hydraulis.quiet_imports import silence_warnings_of_imports


def main() -> int:
    """List all patches; exit status 1 if one does not fit the installed upstream."""
    silence_warnings_of_imports()
    table = Table(title="patches to megatron-core", show_lines=True)
    for column in ("patch", "targets", "why", "until", "fits"):
        table.add_column(column)
    status = 0
    for patch in (
        CPU_BACKEND,
        RNG_STATE,
        DISPATCHED_COUNTS,
        GATED_DELTA_NET,
        RNG_TRACKER,
        JIT_FUSER,
        *ALL,
        MEMORY_BUFFER,
        MOE_METRICS,
    ):
        try:
            patch.check()
            fits = "yes"
        except UpstreamVersionError as error:
            fits, status = str(error), 1
        where = "CPU only: " if patch.cpu_only else ""
        name, targets = (
            (patch.name, _targets(patch))
            if isinstance(patch, Patch)
            else (patch.name.split(":")[1], f"called: {patch.name}")
        )
        table.add_row(name, targets, where + patch.reason, patch.removable_when, fits)
    Console().print(table)
    return status


def _targets(patch: Patch) -> str:
    if len(patch.targets) < 4:
        return "\n".join(patch.targets)
    return f"{len(patch.targets)} modules' name torch"


if __name__ == "__main__":
    sys.exit(main())
