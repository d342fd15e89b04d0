"""``python -m megatron.hydraulis plan``: files in, the best plan for one batch out."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.planner.certified import CertifiedPlanner
from megatron.hydraulis.planner.explanation import PlanExplanation
from megatron.hydraulis.planner.lengths_file import read_lengths
from megatron.hydraulis.planner.native_output import native_prints_to_stderr
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.plan_tables import replica_table, strategy_table, summary
from megatron.hydraulis.strategy import Pool

__all__ = ["add_arguments", "run"]

_MOST_SEED = 2**31 - 1
"""What HiGHS takes."""
_WIDTH = 110
"""Columns of the tables where the output is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths of the batch in tokens: a JSON list, text with a number a line, or an .idx "
        "(its documents are the batch; one of D tokens trains D-1)",
    )
    files.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of the schemes in ms, their limits in tokens per "
        "micro-batch",
    )
    files.add_argument("--pool", required=True, metavar="FILE", help="pool of strategies, JSON")
    files.add_argument("--out", metavar="FILE", help="write the plan here, JSON, times in s")
    output = files.add_mutually_exclusive_group()
    output.add_argument(
        "--explain",
        action="store_true",
        help="print all strategies (bound and found in s, gap, why not chosen) and the replicas "
        "of the chosen one (sequences, tokens, micro-batches, time in s, idle share)",
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
        help="same files and seed, same plan (default: %(default)s)",
    )
    search.add_argument(
        "--plan-time-limit",
        type=float,
        metavar="S",
        help="wall-clock guard in s: after it the best plan in hand is taken and marked "
        "(default: none; the search ends by itself)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Plan the batch and print a line, tables or JSON; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for files and flags that make no sense,
    PlanError when no strategy can hold the batch.
    """
    limit_s = namespace.plan_time_limit
    if limit_s is not None and not limit_s > 0.0:
        raise ConfigurationError(
            f"--plan-time-limit is more than 0 s but is {limit_s} s; raise it or leave it out"
        )
    if not 0 <= namespace.seed <= _MOST_SEED:
        raise ConfigurationError(
            f"--seed is from 0 to {_MOST_SEED} but is {namespace.seed}; give another one"
        )
    lengths = read_lengths(namespace.lengths)
    cost_model = ProfileCostModel.read(namespace.cost_profile)
    pool = Pool.read(namespace.pool)
    planner = CertifiedPlanner(pool, cost_model, seed=namespace.seed, time_limit_s=limit_s)
    with native_prints_to_stderr():
        explanation = planner.explain(lengths) if namespace.explain or namespace.json else None
        plan = planner.plan(lengths) if explanation is None else explanation.plan
    if namespace.out is not None:
        _write(plan, namespace.out)
    if namespace.json and explanation is not None:
        json.dump(_to_json(explanation), sys.stdout, indent=1)
        print()
        return 0
    print(summary(plan))
    if explanation is not None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        console.print(strategy_table(explanation, pool))
        console.print(replica_table(plan, cost_model))
    return 0


def _write(plan: IterationPlan, path: str) -> None:
    try:
        write_json(path, plan.to_json())
    except OSError as error:
        raise ConfigurationError(
            f"--out {path}: must be a path that can be written but: {error.strerror}; "
            f"give another path"
        ) from error


def _to_json(explanation: PlanExplanation) -> dict[str, Any]:
    return {
        "plan": explanation.plan.to_json(),
        "digest": explanation.plan.digest,
        "strategies": [
            {
                "name": outcome.name,
                "bound_s": outcome.bound_s,
                "found_s": outcome.found_s,
                "gap": outcome.gap,
                "why_not_chosen": outcome.why_not_chosen or None,
            }
            for outcome in explanation.strategies
        ],
    }
