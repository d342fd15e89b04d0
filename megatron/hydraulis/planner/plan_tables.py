"""A plan and the choice behind it as tables for people."""

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.explanation import PlanExplanation, StrategyOutcome
from megatron.hydraulis.planner.plan import IterationPlan, ReplicaPlan
from megatron.hydraulis.strategy import Pool

__all__ = ["replica_table", "strategy_table", "summary"]

_MS_PER_S = 1e3
_NONE = "–"


def summary(plan: IterationPlan) -> str:
    """Strategy, time and gap in one line."""
    bound = ""
    if plan.dispatch is not None:
        bound = (
            f", dispatch bound {plan.dispatch.bound_s:.4f} s, gap {100 * plan.dispatch.gap:.2f} % "
            f"({plan.dispatch.status})"
        )
    return (
        f"strategy {plan.strategy}: {plan.predicted_time_s:.4f} s predicted{bound}; "
        f"{plan.num_sequences} sequences, {plan.num_tokens} tokens; "
        f"planned in {plan.plan_time_s:.3f} s"
    )


def strategy_table(explanation: PlanExplanation, pool: Pool) -> Table:
    """Every strategy of the pool, in its order: bound, best plan found, and why not chosen.

    Times are predicted times of the iteration in seconds, overhead included.
    """
    table = _table("strategies", ("strategy", "replicas"), ("bound s", "found s", "gap %"))
    table.add_column("why not chosen", overflow="fold")
    for outcome in explanation.strategies:
        name, replicas = outcome.name, str(pool.strategy(outcome.name))
        style = "bold" if outcome.is_chosen else None
        why = outcome.why_not_chosen or "chosen"
        table.add_row(name, replicas, *_numbers(outcome), why, style=style)
    return table


def _numbers(outcome: StrategyOutcome) -> Iterable[str]:
    for seconds in (outcome.bound_s, outcome.found_s):
        yield _NONE if seconds is None else f"{seconds:.4f}"
    yield _NONE if outcome.gap is None else f"{100 * outcome.gap:.2f}"


def replica_table(plan: IterationPlan, cost_model: CostModel) -> Table:
    """Every replica of the plan: what it is given, how long it takes, how much of it is idle.

    The idle share is that of the makespan in which a stage of the replica does not work: while its
    pipeline fills and drains, and when the replica waits for the slowest one.
    """
    counts = ("sequences", "tokens", "micro-batches", "time s", "idle %")
    table = _table(f"replicas of strategy {plan.strategy}", ("replica", "ranks"), counts)
    for replica in plan.replicas:
        table.add_row(
            str(replica.scheme),
            _ranges(replica.ranks),
            str(replica.num_sequences),
            str(replica.num_tokens),
            str(len(replica.micro_batches)),
            f"{replica.predicted_time_s:.4f}",
            f"{100 * _idle_share(replica, plan.makespan_s, cost_model):.1f}",
        )
    return table


def _idle_share(replica: ReplicaPlan, makespan_s: float, cost_model: CostModel) -> float:
    if makespan_s == 0.0:
        return 0.0
    work_ms = math.fsum(replica.times_ms(cost_model.coefficients))
    return max(0.0, 1.0 - work_ms / (makespan_s * _MS_PER_S))


def _ranges(ranks: Sequence[int]) -> str:
    """Neighbouring ranks as ``0-7``, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table
