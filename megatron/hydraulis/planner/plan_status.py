"""How the plan of an iteration came about, in one word, and whether something went wrong."""

from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["is_marked", "plan_status"]

UNKNOWN = "unknown"
"""Status of a plan without reports."""

_MARKS = ("time limit", "solver ", "greedy")
"""Beginnings of the statuses that mark a plan, the worst last. A plan is greedy where the search
failed, or where the process that searches was lost."""
_SEARCH_ENDED = "search ended"


def plan_status(plan: IterationPlan) -> str:
    """The worse of the statuses of dispatch and packing; 'unknown' for a plan without reports."""
    statuses = [report.status for report in (plan.dispatch, plan.packing) if report is not None]
    return max(statuses, key=_badness, default=UNKNOWN)


def is_marked(status: str) -> bool:
    """Whether a limit, a failing solver or a failing search cut the planning of a plan short."""
    return status.startswith(_MARKS)


def _badness(status: str) -> int:
    """0 for a status that says nothing bad."""
    for number, mark in enumerate(_MARKS):
        if status.startswith(mark):
            return 2 + number
    return 1 if status == _SEARCH_ENDED else 0
