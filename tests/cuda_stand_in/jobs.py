"""Complete training jobs on the stand-in: forks of the host process, with values."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.hydraulis.loop import entry
from tests.cuda_stand_in.pool import in_host
from tests.support import forked_job
from tests.support.forked_job import JobOutcome, Program
from tests.support.forked_ranks import IN_MEMORY


def run_job(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    program: Program = entry.main,
    settings: Mapping[str, Any] | None = None,
    timeout_s: float = forked_job.DEFAULT_TIMEOUT_S,
) -> JobOutcome:
    """`forked_job.run_job` on ``cuda``.

    Args:
        argv: the flags.
        num_ranks: of the job.
        folder: gets each rank's output, and its calls if ``STAND_IN_LOG`` is set.
        program: called on every rank; importable by name.
        settings: environment of every rank, such as ``STAND_IN_MEMORY_BYTES``.
        timeout_s: for the whole job.
    """
    outcome: JobOutcome = in_host(
        _run_in_host, argv, num_ranks, folder, program, dict(settings or {}), timeout_s
    )
    return outcome


def _run_in_host(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    program: Program,
    settings: dict[str, Any],
    timeout_s: float,
) -> JobOutcome:
    exchange = tempfile.mkdtemp(prefix="exchange_", dir=IN_MEMORY)
    try:
        return forked_job.run_job(
            argv,
            num_ranks,
            folder,
            program=partial(_on_device, program, settings | {"STAND_IN_EXCHANGE": exchange}),
            timeout_s=timeout_s,
        )
    finally:
        shutil.rmtree(exchange)


def _on_device(program: Callable[..., None], settings: dict[str, Any], argv: Sequence[str]) -> None:
    """Run the program on a rank, with values in all of its threads."""
    from tests.cuda_stand_in.values import compute_everywhere

    os.environ.update({name: str(value) for name, value in settings.items()})
    compute_everywhere()
    warnings.simplefilter("default")  # the host's own are silent
    program(argv)
