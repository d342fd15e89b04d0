"""The plan of a batch for people: a line, tables, spans for traces, and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import pipeline_schedule
from megatron.hydraulis.observability.trace import Span, Spans
from megatron.hydraulis.planner.plan import (
    MS_PER_S,
    IterationPlan,
    StrategyOutcome,
)
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.replica_plan import ReplicaPlan
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.ranges import check_range
from megatron.hydraulis.strategy import Pool, Replica
from megatron.hydraulis.strategy.notation import ranks_text
from megatron.hydraulis.terminal import figures_table, notebook_html, table_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_US_PER_MS = 1e3
_US_PER_S = 1e6
WIDTH = 110
"""Columns of the tables where there is no terminal."""
_MOST_DRAWN = 32
"""Stages in the picture; more are too many to read."""
_NONE = "–"


@dataclass(frozen=True, eq=False, repr=False)
class PlannedBatch:
    """The plan of a batch, and why its strategy was chosen; a notebook draws it.

    ``print`` shows tables. Times are predicted.
    """

    plan: IterationPlan
    """Which replica trains which sequences, as indices of the lengths, in which micro-batches."""
    strategies: tuple[StrategyOutcome, ...]
    """Bound, best plan found, and why not chosen, of every strategy of the pool."""
    pool: Pool
    cost_model: CostModel

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {summary(self.plan)}>"

    def __str__(self) -> str:
        tables = (self.strategy_table(), replica_table(self.plan, self.cost_model))
        return "\n".join((summary(self.plan), *(table_text(table, WIDTH) for table in tables)))

    def strategy_table(self) -> Table:
        """Every strategy of the pool, in its order: bound, best plan found, and why not chosen.

        Times are predicted times of the iteration in seconds, including overhead: what regrouping
        and optimizer add to the makespan.
        """
        columns = ("bound s", "found s", "gap %", "overhead s")
        table = figures_table("strategies", ("strategy", "replicas"), columns)
        table.add_column("why not chosen", overflow="fold")
        for outcome in self.strategies:
            strategy = self.pool.strategy(outcome.name)
            overhead = f"{self.cost_model.overhead_ms(strategy) / MS_PER_S:.4f}"
            style = "bold" if outcome.is_chosen else None
            why = outcome.why_not_chosen or "chosen"
            numbers = (*_numbers(outcome), overhead)
            table.add_row(strategy.name, str(strategy), *numbers, why, style=style)
        return table

    def figure(self) -> Figure:
        """Forward and backward of the micro-batches of every stage: of its first rank, as all its
        ranks do the same. Of many stages the first ones are drawn."""
        # Planning needs no matplotlib, which takes long to import.
        from megatron.hydraulis.observability.trace_picture import (
            MIN_BORDERED_SHARE,
            trace_figure,
        )

        time_us = self.plan.predicted_time_s * _US_PER_S
        min_regroup_us = MIN_BORDERED_SHARE * time_us  # else its row would look empty
        names = stage_names(replica.replica for replica in self.plan.replicas)
        first, number = next(iter(names)), self.plan.iteration + 1
        # All ranks regroup at the same time.
        spans = [
            replace(span, is_planned=False)
            for rank in list(names)[:_MOST_DRAWN]
            for span in planned_spans(
                self.plan, self.cost_model, rank=rank, iteration=number, start_us=0.0
            )
            if span.track != "regroup" or (rank == first and span.duration_us >= min_regroup_us)
        ]
        whole = Span(
            rank=first,
            track="iteration",
            name="iteration",
            start_us=0.0,
            end_us=time_us,
            detail={"iteration": number, "strategy": self.plan.strategy},
        )
        return trace_figure(Spans.of([whole, *spans]), number, names)

    def _repr_html_(self) -> str:
        from megatron.hydraulis.observability.pictures import figure_svg

        svg = figure_svg(self.figure(), f"plan-{self.plan.digest[:8]}")
        return notebook_html(str(self), svg)

    def to_json(self) -> dict[str, Any]:
        """Plan, digest and strategies by name, times in s."""
        return {
            "plan": self.plan.to_json(),
            "digest": self.plan.digest,
            "strategies": [
                {
                    "name": outcome.name,
                    "bound_s": outcome.bound_s,
                    "found_s": outcome.found_s,
                    "gap": outcome.gap,
                    "overhead_s": self.cost_model.overhead_ms(self.pool.strategy(outcome.name))
                    / MS_PER_S,
                    "why_not_chosen": outcome.why_not_chosen or None,
                }
                for outcome in self.strategies
            ],
        }


def plan_batch(
    lengths: Sequence[int],
    pool: Pool,
    cost_model: CostModel,
    *,
    row_quantum: int = 1,
    seed: int = 0,
    time_limit_s: float | None = None,
) -> PlannedBatch:
    """The best plan found for a batch by the certified planner.

    Args:
        lengths: shape (num_sequences,), in tokens.
        pool: strategies to choose from.
        cost_model: of the job, with a row for every scheme of the pool.
        row_quantum: to which rows are rounded up, in tokens.
        seed: for the solver's tie-breaking.
        time_limit_s: wall-clock limit, after which the best plan so far is used and marked.

    Raises ConfigurationError for an invalid seed or limit, StrategyError for a scheme without
    costs, PlanError if no strategy holds the batch.
    """
    if time_limit_s is not None:
        check_range("--plan-time-limit", time_limit_s)
    check_range("--seed", seed)
    limits = Limits(cost_model, row_quantum=row_quantum)
    planner = CertifiedPlanner(pool, cost_model, limits, seed=seed, time_limit_s=time_limit_s)
    with native_prints_to_stderr():
        explanation = planner.explain(lengths)
    return PlannedBatch(explanation.plan, explanation.strategies, pool, cost_model)


def stage_names(replicas: Iterable[Replica]) -> dict[int, str]:
    """Name of each stage of each replica by its first rank: scheme, stage if several, ranks."""
    names: dict[int, str] = {}
    for replica in replicas:
        scheme = replica.scheme
        of_stage = scheme.tp * scheme.cp
        for stage in range(scheme.pp):
            own = replica.ranks[stage * of_stage : (stage + 1) * of_stage]
            name = f"{scheme}, stage {stage}" if scheme.pp > 1 else str(scheme)
            names[own[0]] = f"{name}, {_rank_text(own)}"
    return names


def _rank_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank {ranks[0]} and {len(ranks) - 1} more"


def planned_spans(
    plan: IterationPlan, cost_model: CostModel, *, rank: int, iteration: int, start_us: float
) -> list[Span]:
    """Predicts the spans of one rank: forward and backward of each of its micro-batches.

    Args:
        plan: the plan of the iteration.
        cost_model: the cost model that it was made with.
        rank: an idle rank, or one of a replica without sequences, has no micro-batches.
        iteration: its number, as logged.
        start_us: when the iteration starts.

    Returns:
        The 1F1B schedule of the rank's stage, with tokens and size of the rank's own context group;
        groups of a wave end together. After the makespan a span 'overhead': the part of regrouping
        and optimizer that the plan does not expect to overlap.
    """
    spans: list[Span] = []
    makespan_s = max((replica.predicted_time_s for replica in plan.replicas), default=0.0)
    mine = plan.replica_of(rank)
    if mine is not None:
        times_ms = mine.times_ms(cost_model.coefficients)
        forward_share = cost_model.coefficients(mine.scheme).forward_share
        position = mine.replica.position_of(rank)
        assert position is not None
        stage = position.stage
        shares = [batch.share_of(position.cp, mine.scheme.cp) for batch in mine.micro_batches]
        spans = [
            Span(
                rank=rank,
                track="compute",
                name="forward" if operation.is_forward else "backward",
                start_us=start_us + operation.start_ms * _US_PER_MS,
                end_us=start_us + operation.end_ms * _US_PER_MS,
                is_planned=True,
                detail={
                    "iteration": iteration,
                    "micro_batch": operation.micro_batch,
                    "stage": stage,
                    "num_tokens": shares[operation.micro_batch].num_tokens,
                    "cp": shares[operation.micro_batch].group.size,
                },
            )
            for operation in pipeline_schedule(
                times_ms, mine.scheme.pp, forward_share=forward_share
            )
            if operation.stage == stage
        ]
    if plan.predicted_time_s > makespan_s:
        spans.append(
            Span(
                rank=rank,
                track="regroup",
                name="overhead",
                start_us=start_us + makespan_s * _US_PER_S,
                end_us=start_us + plan.predicted_time_s * _US_PER_S,
                is_planned=True,
                detail={"iteration": iteration},
            )
        )
    return spans


def summary(plan: IterationPlan) -> str:
    """One line with strategy, time and gap."""
    bound = ""
    if plan.dispatch is not None:
        bound = (
            f", dispatch bound {plan.dispatch.bound_s:.4f} s, gap {100 * plan.dispatch.gap:.2f} % "
            f"({plan.dispatch.status})"
        )
    return (
        f"strategy {plan.strategy}: {plan.predicted_time_s:.4f} s predicted, of which "
        f"{plan.overhead_s:.4f} s regrouping and optimizer{bound}; "
        f"{plan.num_sequences} sequences, {plan.num_tokens} tokens; "
        f"planned in {plan.plan_time_s:.3f} s"
    )


def _numbers(outcome: StrategyOutcome) -> Iterable[str]:
    for seconds in (outcome.bound_s, outcome.found_s):
        yield _NONE if seconds is None else f"{seconds:.4f}"
    yield _NONE if outcome.gap is None else f"{100 * outcome.gap:.2f}"


def replica_table(plan: IterationPlan, cost_model: CostModel) -> Table:
    """Every replica of the plan: its share of the batch, its time, and how much of it is idle.

    The idle share is the part of the makespan in which a stage of the replica does not work: while
    its pipeline fills and drains, and while it waits for the slowest replica.
    """
    counts = ("sequences", "tokens", "micro-batches", "time s", "idle %")
    table = figures_table(f"replicas of strategy {plan.strategy}", ("replica", "ranks"), counts)
    for replica in plan.replicas:
        table.add_row(
            str(replica.scheme),
            ranks_text(replica.ranks),
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
    return max(0.0, 1.0 - work_ms / (makespan_s * MS_PER_S))
