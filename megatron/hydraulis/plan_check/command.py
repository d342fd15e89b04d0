"""``hydraulis check-plan``: checks a plan; the exit status says whether it is valid."""

import argparse
import json
from typing import Any

from megatron.hydraulis.plan_check.files import (
    BrokenRule,
    Plan,
    read_lengths,
    read_plan,
    read_pool,
)
from megatron.hydraulis.plan_check.rules import Findings, check_plan

_EXIT_VALID = 0
_EXIT_INVALID = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    parser.description = (
        "Check a plan, times and bounds included, by code that shares nothing with the "
        "planner. Exit status: 0 and one line for a valid plan, 1 and the broken rule for an "
        "invalid one, 2 for files that cannot be read."
    )
    parser.add_argument("--plan", required=True, metavar="FILE", help="plan, JSON, times in s")
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths of the batch in tokens: an .idx (a document of D tokens trains D-1), a JSON "
        "list, text with a number per line",
    )
    parser.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of schemes in ms, limits in tokens per micro-batch",
    )
    parser.add_argument("--pool", required=True, metavar="FILE", help="pool of strategies, JSON")
    parser.add_argument(
        "--grad-reduce-in-bf16",
        action="store_true",
        help="gradients travelled in bf16: measured overheads count only if they did so there",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Check the plan and print one line, or JSON; returns the exit status.

    Raises DataError for a file that cannot be read.
    """
    lengths = read_lengths(namespace.lengths)
    gradient_bytes = 2 if namespace.grad_reduce_in_bf16 else 4
    pool = read_pool(namespace.pool, namespace.cost_profile, gradient_bytes)
    try:
        plan = read_plan(namespace.plan)
        findings = check_plan(plan, lengths, pool)
    except BrokenRule as broken:
        if namespace.json:
            print(json.dumps({"valid": False, "rule": broken.rule.value, "message": str(broken)}))
        else:
            print(f"invalid: {broken.rule.value}: {broken}")
        return _EXIT_INVALID
    print(
        json.dumps(_to_json(plan, findings), indent=1) if namespace.json else _line(plan, findings)
    )
    return _EXIT_VALID


def _line(plan: Plan, findings: Findings) -> str:
    origin = "by the profile" if findings.is_overhead_measured else "by the plan, not checked"
    parts = [
        f"valid: strategy {plan.strategy}, {findings.predicted_time_s:.6f} s",
        f"regrouping and optimizer {findings.overhead_s:.6f} s {origin}",
    ]
    for stage, bound_s in findings.proved_bound_s.items():
        claim = plan.claims.get(stage)
        claimed = "" if claim is None else f"{claim.bound_s:.6f} s claimed, "
        parts.append(f"{stage} bound {claimed}{bound_s:.6f} s proved here")
    return "; ".join(parts)


def _to_json(plan: Plan, findings: Findings) -> dict[str, Any]:
    return {
        "valid": True,
        "strategy": plan.strategy,
        "predicted_time_s": findings.predicted_time_s,
        "makespan_s": findings.makespan_s,
        "overhead_s": findings.overhead_s,
        "is_overhead_measured": findings.is_overhead_measured,
        "claimed_bound_s": {stage: claim.bound_s for stage, claim in plan.claims.items()},
        "proved_bound_s": findings.proved_bound_s,
        "strategy_bounds_s": findings.strategy_bounds_s,
        "sequence_ids": plan.sequence_ids,
    }
