"""What an earlier run left in a run folder goes out of a new run's way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.metrics_writer import METRICS_FILE_NAME
from megatron.hydraulis.observability.report_run import (
    CONFIG_FILE_NAME,
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
)
from megatron.hydraulis.observability.summary import SUMMARY_FILE_NAME
from megatron.hydraulis.observability.trace_file import MERGED_FILE_NAME, rank_files

__all__ = ["REFITTED_PROFILE_FILE_NAME", "set_aside_earlier_run", "set_aside_earlier_trace"]

REFITTED_PROFILE_FILE_NAME = "cost_profile_refitted.json"
"""What ``--refit-cost-profile`` leaves at the end of a run."""

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
    """Move metrics, picture, configuration and TensorBoard events into a folder of their own.

    So a new run in the same folder starts with none; event files of two runs in one folder would be
    drawn as one curve. Events that went elsewhere by ``--tensorboard-dir`` stay there.

    Returns:
        ``RUN_DIR/earlier.N`` with the first free N; None if there was nothing to move.

    Raises:
        HydraulisError: something cannot be moved.
    """
    run_dir = Path(run_dir)
    found = [path for name in _LEFT_BY_A_RUN if _holds_something(path := run_dir / name)]
    return _set_aside(run_dir, found, "--run-dir")


def set_aside_earlier_trace(folder: str | Path) -> Path | None:
    """Move the files of an earlier trace, whose ranks may have been others, into a folder.

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
            f"what an earlier run left in {folder} must be set aside, in {aside}: "
            f"{error.strerror}; choose another {option}"
        ) from error
    return aside


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
