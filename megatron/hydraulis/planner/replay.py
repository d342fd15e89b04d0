"""Plans recorded by one run and replayed by another, without a solver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.json_object import read_json, write_json
from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["RecordedPlans", "plan_path", "write_plan"]


def plan_path(folder: Path, iteration: int) -> Path:
    """Where the plan of an iteration lies; ``iteration`` counts from 0, the name from 1."""
    return folder / f"iteration_{iteration + 1:07d}.json"


def write_plan(folder: Path, plan: IterationPlan) -> None:
    """Record a plan; makes the folder if there is none.

    Raises:
        PlanError: the file cannot be written.
    """
    path = plan_path(folder, plan.iteration)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, plan.to_json())
    except OSError as error:
        raise PlanError(
            f"iteration {plan.iteration + 1}: the plan cannot be written to {path}: "
            f"{error.strerror or error}; make room or name another --plan-dir"
        ) from error


class RecordedPlans:
    """A planner that has every plan already: those which ``--plan-dir`` of an earlier run wrote.

    Args:
        folder: one JSON file an iteration.

    Raises:
        PlanError: the folder holds no plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not plan_path(folder, 0).exists() and not any(folder.glob("iteration_*.json")):
            raise PlanError(
                f"--replay-plans {folder}: there is no iteration_*.json in it; name a folder that "
                "--plan-dir of an earlier run wrote"
            )

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """The recorded plan, if it is one for these lengths.

        Raises:
            PlanError: no file for this iteration, a damaged one, or one for other sequences.
        """
        path = plan_path(self._folder, iteration)
        if not path.exists():
            raise PlanError(
                f"iteration {iteration + 1}: {path} was not recorded; train fewer iterations or "
                "plan anew without --replay-plans"
            )
        try:
            plan = IterationPlan.from_json(read_json(path, "plan", PlanError))
        except PlanError as error:
            raise PlanError(
                f"iteration {iteration + 1}: {path} cannot be read: {error}; record the plans anew"
            ) from error
        found = {
            index: length
            for replica in plan.replicas
            for micro_batch in replica.micro_batches
            for index, length in zip(micro_batch.sequences, micro_batch.lengths, strict=True)
        }
        if found != dict(enumerate(lengths)):
            raise PlanError(
                f"iteration {iteration + 1}: {path} plans other sequences than this run draws; "
                "replay with the same data, --seed, batch size and --seq-length"
            )
        return plan
