"""Moves what an earlier run left in a folder out of a new run's way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import METRICS_FILE_NAME
from megatron.hydraulis.observability.report_data import (
    CONFIG_FILE_NAME,
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
    SUMMARY_FILE_NAME,
)
from megatron.hydraulis.observability.trace import MERGED_FILE_NAME, rank_files

__all__ = ["REFITTED_PROFILE_FILE_NAME", "set_aside_earlier_run", "set_aside_earlier_trace"]

REFITTED_PROFILE_FILE_NAME = "cost_profile_refitted.json"
"""Written by ``--refit-cost-profile`` at the end of a run."""

_LEFT_BY_A_RUN = (
    METRICS_FILE_NAME,
    SUMMARY_FILE_NAME,
    CONFIG_FILE_NAME,
    "tensorboard",
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
    REFITTED_PROFILE_FILE_NAME,
)


def set_aside_earlier_run(run_dir: str | Path) -> Path | None:
    """Moves metrics, pictures, configuration and TensorBoard events into a subfolder.

    Event files of two runs in one folder would be drawn as one curve. Events in another folder
    (``--tensorboard-dir``) are not moved.

    Returns:
        ``RUN_DIR/earlier.N`` with the first free N; None if there was nothing to move.

    Raises:
        HydraulisError: something cannot be moved.
    """
    run_dir = Path(run_dir)
    paths = [run_dir / name for name in _LEFT_BY_A_RUN]
    found = [path for path in paths if (any(path.iterdir()) if path.is_dir() else path.exists())]
    return _set_aside(run_dir, found, "--run-dir")


def set_aside_earlier_trace(folder: str | Path) -> Path | None:
    """Moves the files of an earlier trace, which may have had other ranks, into a subfolder.

    Returns and raises as `set_aside_earlier_run` does.
    """
    folder = Path(folder)
    found = [*rank_files(folder), folder / MERGED_FILE_NAME]
    return _set_aside(folder, [path for path in found if path.exists()], "--trace")


def _set_aside(folder: Path, found: Sequence[Path], option: str) -> Path | None:
    if not found:
        return None
    number = 1
    while (aside := folder / f"earlier.{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    except OSError as error:
        raise HydraulisError(
            f"files of an earlier run in {folder} must be moved to {aside}: {error.strerror}; "
            f"choose another {option}"
        ) from error
    return aside
