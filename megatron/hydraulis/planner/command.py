"""``hydraulis plan``: the best plan for one batch, from files."""

import argparse

from megatron.hydraulis.command_line import (
    add_flags,
    add_lengths_argument,
    add_pool_argument,
    add_profile_argument,
)
from megatron.hydraulis.cost_model.job_costs import (
    add_regroup_arguments,
    job_options,
    print_bf16_advice,
    warn_of_assumed_rows,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.batches import BatchesRequest
from megatron.hydraulis.lengths.counts import read_lengths
from megatron.hydraulis.planner.planned import WIDTH, plan_batch, replica_table, summary
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import print_json, results_console, shown_while


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    files = parser.add_argument_group("input and output")
    add_lengths_argument(files, of_batch=True)
    add_profile_argument(files)
    add_pool_argument(files)
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
    add_flags(search, BatchesRequest, "row_quantum_tokens")
    add_regroup_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Plan the batch and print a line, tables or JSON; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError
    when no strategy can hold the batch.
    """
    lengths = read_lengths(namespace.lengths)
    pool, path = Pool.read(namespace.pool), namespace.cost_profile
    profile = ProfileCostModel.read(path)
    with shown_while(f"plan of {len(lengths):,} sequences"):
        costs = job_options(namespace).costs_of_pool(
            profile, pool, tp_degrees=(pool.tp_lcm,), path=path
        )
        cost_model = costs.profile
        planned = plan_batch(
            lengths,
            pool,
            cost_model,
            row_quantum=namespace.row_quantum_tokens,
            seed=namespace.seed,
            time_limit_s=namespace.plan_time_limit,
        )
    plan = planned.plan
    if namespace.out is not None:
        write_output(namespace.out, plan.to_json())
    if namespace.json:
        assumed = cost_model.assumed_schemes(pool)
        print_json(planned.to_json() | {"assumed": list(map(str, assumed))})
        return 0
    warn_of_unknown_overheads(cost_model, pool.strategies)
    warn_of_assumed_rows(cost_model, pool)
    print(summary(plan))
    print_bf16_advice(cost_model, {pool.strategy(plan.strategy): 1.0}, plan.predicted_time_s)
    if namespace.explain:
        console = results_console(WIDTH)
        console.print(planned.strategy_table())
        console.print(replica_table(plan, cost_model))
    return 0
