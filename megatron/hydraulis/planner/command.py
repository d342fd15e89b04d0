"""``hydraulis plan``: the best plan for one batch, from files."""

import argparse
import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits, add_row_quantum
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.shape_arguments import (
    add_regroup_arguments,
    job_options,
    print_bf16_advice,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.command import check_seed
from megatron.hydraulis.lengths.counts import read_lengths
from megatron.hydraulis.planner.plan import (
    MS_PER_S,
    IterationPlan,
    PlanExplanation,
    StrategyOutcome,
)
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.replica_plan import ReplicaPlan
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.strategy.notation import ranks_text
from megatron.hydraulis.terminal import figures_table, print_json, print_next, results_console

# Columns of the tables if the output is not a terminal.
_WIDTH = 110
_NONE = "–"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths of the batch in tokens: a JSON list, text with one number per line, or an "
        ".idx (its documents are the batch; one of D tokens trains D-1)",
    )
    files.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of the schemes in ms and their limits in tokens per "
        "micro-batch",
    )
    files.add_argument("--pool", required=True, metavar="FILE", help="pool of strategies, JSON")
    files.add_argument("--out", metavar="FILE", help="write the plan here, JSON, times in s")
    output = files.add_mutually_exclusive_group()
    output.add_argument(
        "--explain",
        action="store_true",
        help="print all strategies (bound and best plan found in s, gap, why not chosen) and the "
        "replicas of the chosen one (sequences, tokens, micro-batches, time in s, idle share)",
    )
    output.add_argument(
        "--json", action="store_true", help="print plan, digest and all strategies as JSON"
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="for the solver; the same files and seed give the same plan (default: %(default)s)",
    )
    search.add_argument(
        "--plan-time-limit",
        type=float,
        metavar="S",
        help="wall-clock limit in s, after which the best plan so far is used and marked "
        "(default: none)",
    )
    add_row_quantum(search)
    add_regroup_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Plan the batch and print a line, tables or JSON; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError
    when no strategy can hold the batch.
    """
    limit_s = namespace.plan_time_limit
    if limit_s is not None and not limit_s > 0.0:
        raise ConfigurationError(
            f"--plan-time-limit is more than 0 s but is {limit_s} s; raise it or leave it out"
        )
    check_seed(namespace.seed)
    lengths = read_lengths(namespace.lengths)
    pool = Pool.read(namespace.pool)
    cost_model = _cost_model(namespace, pool)
    limits = Limits(cost_model, row_quantum=namespace.row_quantum_tokens)
    planner = CertifiedPlanner(pool, cost_model, limits, seed=namespace.seed, time_limit_s=limit_s)
    with native_prints_to_stderr():
        explanation = planner.explain(lengths) if namespace.explain or namespace.json else None
        plan = planner.plan(lengths) if explanation is None else explanation.plan
    if namespace.out is not None:
        write_output(namespace.out, plan.to_json())
    if namespace.json and explanation is not None:
        print_json(_to_json(explanation, pool, cost_model))
        return 0
    warn_of_unknown_overheads(cost_model, pool.strategies)
    print(summary(plan))
    print_bf16_advice(cost_model, {pool.strategy(plan.strategy): 1.0}, plan.predicted_time_s)
    if explanation is not None:
        console = results_console(_WIDTH)
        console.print(strategy_table(explanation, pool, cost_model))
        console.print(replica_table(plan, cost_model))
    if namespace.out is not None:
        print_next(
            *("hydraulis check-plan --plan", namespace.out, "--lengths", namespace.lengths),
            *("--cost-profile", namespace.cost_profile, "--pool", namespace.pool),
            *(["--grad-reduce-in-bf16"] if namespace.grad_reduce_in_bf16 else []),
        )
    return 0


def _cost_model(namespace: argparse.Namespace, pool: Pool) -> ProfileCostModel:
    path = namespace.cost_profile
    return (
        job_options(namespace)
        .costs_of_pool(ProfileCostModel.read(path), pool, tp_degrees=(pool.tp_lcm,), path=path)
        .profile
    )


def _to_json(explanation: PlanExplanation, pool: Pool, cost_model: CostModel) -> dict[str, Any]:
    return {
        "plan": explanation.plan.to_json(),
        "digest": explanation.plan.digest,
        "strategies": [
            {
                "name": outcome.name,
                "bound_s": outcome.bound_s,
                "found_s": outcome.found_s,
                "gap": outcome.gap,
                "overhead_s": cost_model.overhead_ms(pool.strategy(outcome.name)) / MS_PER_S,
                "why_not_chosen": outcome.why_not_chosen or None,
            }
            for outcome in explanation.strategies
        ],
    }


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


def strategy_table(explanation: PlanExplanation, pool: Pool, cost_model: CostModel) -> Table:
    """Every strategy of the pool, in its order: bound, best plan found, and why not chosen.

    Times are predicted times of the iteration in seconds, including overhead: what regrouping and
    optimizer add to the makespan.
    """
    columns = ("bound s", "found s", "gap %", "overhead s")
    table = figures_table("strategies", ("strategy", "replicas"), columns)
    table.add_column("why not chosen", overflow="fold")
    for outcome in explanation.strategies:
        strategy = pool.strategy(outcome.name)
        overhead = f"{cost_model.overhead_ms(strategy) / MS_PER_S:.4f}"
        style = "bold" if outcome.is_chosen else None
        why = outcome.why_not_chosen or "chosen"
        numbers = (*_numbers(outcome), overhead)
        table.add_row(strategy.name, str(strategy), *numbers, why, style=style)
    return table


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
