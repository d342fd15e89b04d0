"""A plan checked against its batch and its strategy, rule after rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.plan_check.bounds import (
    proved_packing_bound_ms,
    proved_strategy_bound_ms,
)
from megatron.hydraulis.plan_check.broken_rule import BrokenRule, Rule
from megatron.hydraulis.plan_check.files import (
    Job,
    Plan,
    PlannedMicroBatch,
    PlannedReplica,
    SchemeFigures,
    StrategyFigures,
)
from megatron.hydraulis.plan_check.schedule import simulated_time_ms
from megatron.hydraulis.plan_check.strategy_text import Shape

__all__ = ["Findings", "check_plan"]

_MS_PER_S = 1e3
# Sums of floats in another order differ in the last digits only.
_RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Findings:
    """What was computed anew for a plan that keeps all rules."""

    predicted_time_s: float
    makespan_s: float
    proved_dispatch_bound_s: float
    """No plan with this strategy has a smaller makespan."""
    proved_packing_bound_s: float
    """No packing of this dispatch has a smaller makespan."""
    strategy_bounds_s: dict[str, float | None]
    """No plan with a strategy takes less, overhead included; None where the batch does not fit."""


def check_plan(plan: Plan, lengths: Sequence[int], job: Job) -> Findings:
    """Check all rules; BrokenRule names the first that the plan breaks."""
    strategy = _strategy(plan, job)
    _check_sequences(plan, lengths)
    times_ms = [
        _checked_time_ms(index, replica, strategy) for index, replica in enumerate(plan.replicas)
    ]
    makespan_s = max(times_ms) / _MS_PER_S
    overhead_s = strategy.overhead_ms / _MS_PER_S
    _check_equal(
        Rule.ITERATION_TIME,
        "the plan's predicted time",
        plan.predicted_time_s,
        makespan_s + overhead_s,
        f"the slowest replica takes {makespan_s:.6f} s and regrouping and optimizer "
        f"{overhead_s:.6f} s",
    )
    _check_claims(plan, makespan_s)
    shares = [
        [length for micro_batch in replica.micro_batches for length in micro_batch.lengths]
        for replica in plan.replicas
    ]
    at_best = {
        name: [figures.at_best for figures in other.figures]
        for name, other in job.strategies.items()
    }
    packing_bounds_ms = map(proved_packing_bound_ms, shares, at_best[plan.strategy])
    bounds_ms = {
        name: proved_strategy_bound_ms(lengths, at_best[name])
        for name, other in job.strategies.items()
    }
    return Findings(
        predicted_time_s=makespan_s + overhead_s,
        makespan_s=makespan_s,
        proved_dispatch_bound_s=bounds_ms[plan.strategy] / _MS_PER_S,
        proved_packing_bound_s=max(packing_bounds_ms) / _MS_PER_S,
        strategy_bounds_s={
            name: (bound_ms + job.strategies[name].overhead_ms) / _MS_PER_S
            if math.isfinite(bound_ms)
            else None
            for name, bound_ms in bounds_ms.items()
        },
    )


def _strategy(plan: Plan, job: Job) -> StrategyFigures:
    """The plan's strategy, with the plan's replicas on its ranks."""
    strategy = job.strategies.get(plan.strategy)
    if strategy is None:
        raise BrokenRule(
            Rule.UNKNOWN_STRATEGY,
            f"the plan is for {plan.strategy!r} but the pool has {', '.join(job.strategies)}",
        )
    if len(plan.replicas) != len(strategy.replicas):
        raise BrokenRule(
            Rule.REPLICA_COUNT,
            f"the plan has {len(plan.replicas)} replicas but strategy {strategy.name!r} has "
            f"{len(strategy.replicas)}",
        )
    for index, (replica, (shape, ranks)) in enumerate(
        zip(plan.replicas, strategy.replicas, strict=True)
    ):
        if replica.shape != shape:
            raise BrokenRule(
                Rule.REPLICA_SCHEME,
                f"replica {index} is {replica.shape} but strategy {strategy.name!r} has {shape}",
            )
        if replica.ranks != ranks:
            raise BrokenRule(
                Rule.REPLICA_RANKS,
                f"replica {index} is on ranks {replica.ranks} but strategy {strategy.name!r} "
                f"places it on {ranks}",
            )
    return strategy


def _check_sequences(plan: Plan, lengths: Sequence[int]) -> None:
    seen: set[int] = set()
    for index, replica in enumerate(plan.replicas):
        for place, (sequences, planned, _) in enumerate(replica.micro_batches):
            where = f"micro-batch {place} of replica {index}"
            if not sequences or len(sequences) != len(planned):
                raise BrokenRule(
                    Rule.EMPTY_MICRO_BATCH,
                    f"{where} has {len(sequences)} sequences and {len(planned)} lengths",
                )
            for sequence, length in zip(sequences, planned, strict=True):
                if sequence >= len(lengths):
                    raise BrokenRule(
                        Rule.UNKNOWN_SEQUENCE,
                        f"{where} has sequence {sequence} but the batch ends at {len(lengths) - 1}",
                    )
                if sequence in seen:
                    raise BrokenRule(
                        Rule.REPEATED_SEQUENCE, f"{where} has sequence {sequence} once more"
                    )
                seen.add(sequence)
                if length != lengths[sequence]:
                    raise BrokenRule(
                        Rule.SEQUENCE_LENGTH,
                        f"{where} has sequence {sequence} with {length} tokens but it has "
                        f"{lengths[sequence]}",
                    )
    missing = set(range(len(lengths))) - seen
    if missing:
        raise BrokenRule(
            Rule.MISSING_SEQUENCE,
            f"{len(missing)} of {len(lengths)} sequences are in no micro-batch, the first of "
            f"them {min(missing)}",
        )


def _checked_time_ms(index: int, replica: PlannedReplica, strategy: StrategyFigures) -> float:
    """The time of a replica, after checking limits and the predicted time."""
    figures = strategy.figures[index]
    times_ms = [
        max(
            _group_time_ms(f"micro-batch {place} of replica {index}{where}", lengths, of_group)
            for where, lengths, of_group in _groups(
                index, place, micro_batch, replica.shape, figures
            )
        )
        for place, micro_batch in enumerate(replica.micro_batches)
    ]
    time_ms = simulated_time_ms(times_ms, figures.num_stages)
    _check_equal(
        Rule.REPLICA_TIME,
        f"the predicted time of replica {index}",
        replica.predicted_time_s,
        time_ms / _MS_PER_S,
        f"1F1B over {len(times_ms)} micro-batches on {figures.num_stages} stages was simulated",
    )
    return time_ms


def _groups(
    index: int,
    place: int,
    micro_batch: PlannedMicroBatch,
    shape: Shape,
    figures: SchemeFigures,
) -> list[tuple[str, list[int], SchemeFigures]]:
    """What runs at a time: place, lengths and figures of each group, of all cp ranks if none is
    listed."""
    if not micro_batch.groups:
        return [("", micro_batch.lengths, figures)]
    of_size = {group.cp: group for group in figures.groups}
    found = []
    num_ranks = num_sequences = 0
    for offset, size, count in micro_batch.groups:
        if offset != num_ranks or size not in of_size or offset % size:
            break
        lengths = micro_batch.lengths[num_sequences : num_sequences + count]
        found.append((f" on cp ranks {offset} to {offset + size - 1}", lengths, of_size[size]))
        num_ranks += size
        num_sequences += count
    if num_ranks != shape.cp or num_sequences != len(micro_batch.lengths):
        sizes = ", ".join(map(str, sorted(of_size))) or "none"
        raise BrokenRule(
            Rule.CONTEXT_GROUPS,
            f"micro-batch {place} of replica {index} has {len(micro_batch.lengths)} sequences and "
            f"groups {micro_batch.groups} as (offset, size, sequences) on {shape}, of which the "
            f"profile knows groups of {sizes}",
        )
    return found


def _group_time_ms(what: str, lengths: list[int], figures: SchemeFigures) -> float:
    held = figures.held_tokens(lengths)
    if held > figures.max_tokens:
        raise BrokenRule(
            Rule.TOKEN_LIMIT,
            f"{what} has {held} tokens{' with padding' if figures.cp > 1 else ''} but the limit "
            f"is {figures.max_tokens}",
        )
    return figures.time_ms(lengths)


def _check_claims(plan: Plan, makespan_s: float) -> None:
    for stage, claim in plan.claims.items():
        _check_equal(
            Rule.STAGE_OBJECTIVE,
            f"the objective of {stage}",
            claim.objective_s,
            makespan_s,
            "that is the makespan",
        )
        if claim.bound_s > makespan_s * (1.0 + _RELATIVE_TOLERANCE):
            raise BrokenRule(
                Rule.STAGE_BOUND,
                f"the bound of {stage} is {claim.bound_s:.6f} s but the plan itself takes "
                f"{makespan_s:.6f} s",
            )
        gap = (claim.objective_s - claim.bound_s) / claim.objective_s if makespan_s else 0.0
        if abs(claim.gap - max(0.0, gap)) > _RELATIVE_TOLERANCE:
            raise BrokenRule(
                Rule.STAGE_GAP,
                f"the gap of {stage} is {claim.gap:.6f} but objective and bound make {gap:.6f}",
            )


def _check_equal(rule: Rule, what: str, claimed_s: float, found_s: float, why: str) -> None:
    if not math.isclose(claimed_s, found_s, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise BrokenRule(rule, f"{what} is {claimed_s:.6f} s but must be {found_s:.6f} s: {why}")
