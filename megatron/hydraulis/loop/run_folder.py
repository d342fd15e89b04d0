"""The folders of a run: made and checked before ranks meet, filled at the start and at the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.describe import describe
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.loop.planning import Planning
from megatron.hydraulis.observability.console import closing_table
from megatron.hydraulis.observability.records import METRICS_FILE_NAME
from megatron.hydraulis.observability.report_data import read_run
from megatron.hydraulis.observability.report_figures import write_summary

__all__ = ["close_run", "make_folders", "write_configuration"]

_PLAN_FILES = "iteration_*.json"


def make_folders(resolved: Resolved) -> None:
    """Make the folders of the run, on every rank: a rank that failed later would be waited for.

    Raises ConfigurationError for one that cannot be written, and for a --plan-dir that holds plans
    already, unless the run goes on from a checkpoint: those of two runs could not be told apart.
    """
    hydraulis = resolved.hydraulis
    folders = {
        "--run-dir": hydraulis.run_dir,
        "--plan-dir": hydraulis.plan_dir,
        "--trace": hydraulis.trace,
        "--tensorboard-dir": resolved.args.tensorboard_dir,
        "--save": resolved.args.save,
    }
    if hydraulis.plan_dir is not None and resolved.args.load is None:
        num_plans = sum(1 for _ in Path(hydraulis.plan_dir).glob(_PLAN_FILES))
        if num_plans:
            raise ConfigurationError(
                f"--plan-dir {hydraulis.plan_dir} is for the plans of one run but holds "
                f"{num_plans} of an earlier one; name another folder or empty it"
            )
    for option, folder in folders.items():
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(option, folder, error.strerror or str(error)) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _cannot_write(option, folder, "no permission")


def write_configuration(
    resolved: Resolved, planning: Planning, corpora: Sequence[Corpus | None]
) -> None:
    """``config.json``: strategies, all settings, and what the corpora hold.

    Raises ConfigurationError when it cannot be written.
    """
    corpus = {
        part.name: {"datasets": [str(prefix) for prefix in part.prefixes]}
        | dataclasses.asdict(part.report)
        for part in corpora
        if part is not None
    }
    run_dir = Path(resolved.hydraulis.run_dir)
    try:
        description = describe(
            resolved,
            planning.pool.strategies,
            planning.limits,
            cost_model=planning.source,
            left_out=planning.left_out,
        )
        write_json(run_dir / "config.json", description | {"corpus": corpus})
    except OSError as error:
        raise _cannot_write("--run-dir", run_dir, error.strerror or str(error)) from error


def close_run(run_dir: Path) -> None:
    """Writes the summary and prints the closing table, if an iteration was trained."""
    if (run_dir / METRICS_FILE_NAME).stat().st_size:
        run = read_run(run_dir, only_last_start=True)
        write_summary(run)
        print(closing_table(run), flush=True)


def _cannot_write(option: str, folder: object, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write to {option} {folder}: {reason}; make room or name another folder"
    )
