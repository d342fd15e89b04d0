"""``hydraulis check-plan``: a plan checked against its batch and its strategy, rule after rule.

Bounds are proved without a solver: any weights on the replicas prove one, so none is trusted.

For a replica r with work W_r, tokens S_r, limit l_r and shortest micro-batch t_r, in any order of
its micro-batches, ``T_r ≥ W_r + c_r·max(1, S_r/l_r) + (pp_r-1)·t_r`` when it has sequences. With
weights λ_r ≥ 0 that add up to 1 the makespan is at least ``Σ λ_r·T_r``, which is at least

    Σ_i min_r λ_r·e_r(s_i) + Σ_r λ_r·f_r,    e_r(s) = a·s² + b·s + c·s/l,   f_r = (pp-1)·t_min

over the replicas that can hold s_i. The same holds with ``e_r(s) = a·s² + b·s`` and
``f_r = c + (pp-1)·t_min``. Replicas without sequences have no f: either no replica is empty, or one
of some scheme is, and then the others do the work. The minimum over these cases is the bound.

A sequence that would take longer than the plan on some replica is not there: see
proved_strategy_bound_ms.
"""

import argparse
import heapq
import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.command_line import (
    add_lengths_argument,
    add_pool_argument,
    add_profile_argument,
)
from megatron.hydraulis.plan_check.files import (
    BrokenRule,
    Plan,
    PlannedMicroBatch,
    PlannedReplica,
    Rule,
    SchemeFigures,
    Shape,
    StrategyFigures,
    read_lengths,
    read_plan,
    read_pool,
)

EXIT_INVALID = 1
_MS_PER_S = 1e3
# Sums of floats in another order differ in the last digits only.
_RELATIVE_TOLERANCE = 1e-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    parser.description = (
        "Check a plan, times and bounds included, by code that shares nothing with the "
        "planner. Exit status: 0 and one line for a valid plan, 1 and the broken rule for an "
        "invalid one, 2 for files that cannot be read."
    )
    parser.add_argument("--plan", required=True, metavar="FILE", help="plan, JSON, times in s")
    add_lengths_argument(parser, of_batch=True)
    add_profile_argument(parser)
    add_pool_argument(parser)
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
        return EXIT_INVALID
    print(
        json.dumps(_to_json(plan, findings), indent=1) if namespace.json else _line(plan, findings)
    )
    return 0


@dataclass(frozen=True)
class Findings:
    """What was computed here for a plan that keeps all rules."""

    predicted_time_s: float
    makespan_s: float
    is_overhead_measured: bool
    """Whether the profile has the time of regrouping and optimizer; else it is the plan's."""
    proved_bound_s: dict[str, float]
    """``dispatch``: no plan with this strategy has a smaller makespan; ``packing``: no packing of
    this dispatch has."""
    strategy_bounds_s: dict[str, float | None]
    """No plan with a strategy takes less, measured overhead included; None where the batch does not
    fit."""

    @property
    def overhead_s(self) -> float:
        """What regrouping and optimizer add to the makespan."""
        return self.predicted_time_s - self.makespan_s


def check_plan(plan: Plan, lengths: Sequence[int], pool: Mapping[str, StrategyFigures]) -> Findings:
    """Check all rules; BrokenRule names the first that the plan breaks."""
    strategy = _strategy(plan, pool)
    _check_sequences(plan, lengths)
    times_ms = [
        _checked_time_ms(index, replica, strategy) for index, replica in enumerate(plan.replicas)
    ]
    makespan_s = max(times_ms) / _MS_PER_S
    # What the profile does not say was computed from bytes and links, which is not repeated here.
    overhead_s = (
        max(0.0, plan.predicted_time_s - makespan_s)
        if strategy.overhead_ms is None
        else strategy.overhead_ms / _MS_PER_S
    )
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
    at_best = {name: [f.at_best for f in other.figures] for name, other in pool.items()}
    bounds_ms = {name: proved_strategy_bound_ms(lengths, at_best[name]) for name in pool}
    packing_bounds_ms = map(proved_packing_bound_ms, shares, at_best[plan.strategy])
    return Findings(
        predicted_time_s=makespan_s + overhead_s,
        makespan_s=makespan_s,
        is_overhead_measured=strategy.overhead_ms is not None,
        proved_bound_s={
            "dispatch": bounds_ms[plan.strategy] / _MS_PER_S,
            "packing": max(packing_bounds_ms) / _MS_PER_S,
        },
        strategy_bounds_s={
            name: (bound_ms + (pool[name].overhead_ms or 0.0)) / _MS_PER_S
            if math.isfinite(bound_ms)
            else None
            for name, bound_ms in bounds_ms.items()
        },
    )


def _strategy(plan: Plan, pool: Mapping[str, StrategyFigures]) -> StrategyFigures:
    """The plan's strategy, after checking that the plan has its replicas on its ranks."""
    strategy = pool.get(plan.strategy)
    if strategy is None:
        raise BrokenRule(
            Rule.UNKNOWN_STRATEGY,
            f"the plan is for {plan.strategy!r} but the pool has {', '.join(pool)}",
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
        for place, (sequences, planned, *_) in enumerate(replica.micro_batches):
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
                        Rule.REPEATED_SEQUENCE,
                        f"{where} has sequence {plan.named(sequence)} once more",
                    )
                seen.add(sequence)
                if length != lengths[sequence]:
                    raise BrokenRule(
                        Rule.SEQUENCE_LENGTH,
                        f"{where} has sequence {plan.named(sequence)} with {length} tokens but it "
                        f"has {lengths[sequence]}",
                    )
    missing = set(range(len(lengths))) - seen
    if missing:
        raise BrokenRule(
            Rule.MISSING_SEQUENCE,
            f"{len(missing)} of {len(lengths)} sequences are in no micro-batch, the first of "
            f"them {plan.named(min(missing))}",
        )
    if plan.sequence_ids is not None and len(plan.sequence_ids) != len(lengths):
        raise BrokenRule(
            Rule.SEQUENCE_IDS,
            f"the plan lists {len(plan.sequence_ids)} ids but the batch has {len(lengths)} "
            "sequences",
        )


def _checked_time_ms(index: int, replica: PlannedReplica, strategy: StrategyFigures) -> float:
    """The time of a replica, after checking limits and the predicted time."""
    figures = strategy.figures[index]
    times_ms = []
    for place, micro_batch in enumerate(replica.micro_batches):
        where = f"micro-batch {place} of replica {index}"
        groups = _groups(where, micro_batch, replica.shape, figures)
        times_ms.append(max(_group_time_ms(*group) for group in groups))
    time_ms = simulated_time_ms(times_ms, figures.num_stages, figures.forward_share)
    _check_equal(
        Rule.REPLICA_TIME,
        f"the predicted time of replica {index}",
        replica.predicted_time_s,
        time_ms / _MS_PER_S,
        f"1F1B over {len(times_ms)} micro-batches on {figures.num_stages} stages was simulated",
    )
    return time_ms


def _groups(
    where: str, micro_batch: PlannedMicroBatch, shape: Shape, figures: SchemeFigures
) -> list[tuple[str, list[int], SchemeFigures, int | None]]:
    """What runs at the same time: place, lengths, figures and row of each group, or of all cp ranks
    if no group is listed. A row is None where rows are not listed."""
    num_groups = max(1, len(micro_batch.groups))
    rows: list[int | None] = [*micro_batch.rows] or [None] * num_groups
    if len(rows) != num_groups:
        raise BrokenRule(
            Rule.ROWS,
            f"{where} lists rows {rows} but has {len(micro_batch.groups) or 'no'} groups",
        )
    if not micro_batch.groups:
        return [(where, micro_batch.lengths, figures, rows[0])]
    of_size = {group.cp: group for group in figures.groups}
    found = []
    num_ranks = num_sequences = 0
    for (offset, size, count), row in zip(micro_batch.groups, rows, strict=True):
        if offset != num_ranks or size not in of_size or offset % size:
            break
        lengths = micro_batch.lengths[num_sequences : num_sequences + count]
        ranks = f"cp ranks {offset} to {offset + size - 1}"
        found.append((f"{where} on {ranks}", lengths, of_size[size], row))
        num_ranks += size
        num_sequences += count
    if num_ranks != shape.cp or num_sequences != len(micro_batch.lengths):
        sizes = ", ".join(map(str, sorted(of_size))) or "none"
        raise BrokenRule(
            Rule.CONTEXT_GROUPS,
            f"{where} has {len(micro_batch.lengths)} sequences and groups {micro_batch.groups} as "
            f"(offset, size, sequences) on {shape}, of which the profile knows groups of {sizes}",
        )
    return found


def _group_time_ms(what: str, lengths: list[int], figures: SchemeFigures, row: int | None) -> float:
    needed = figures.needed_tokens(lengths)
    if row is not None and (row < needed or row % figures.row_multiple):
        raise BrokenRule(
            Rule.ROWS,
            f"{what} has a row of {row} tokens, which must be a multiple of "
            f"{figures.row_multiple} from {needed} on",
        )
    held = figures.held_tokens(lengths, row)
    if held > figures.max_tokens:
        raise BrokenRule(
            Rule.TOKEN_LIMIT,
            f"{what} has {held} tokens{' with padding' if held > sum(lengths) else ''} but the "
            f"limit is {figures.max_tokens}",
        )
    return figures.time_ms(lengths, row)


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


# --- the time of a replica -----------------------------------------------------------------------

_Operation = tuple[str, int]
"""Kind, F or B, and micro-batch."""


def simulated_time_ms(
    times_ms: Sequence[float],
    num_stages: int,
    forward_share: float = SchemeFigures.forward_share,
) -> float:
    """When the last operation of 1F1B ends, simulated event by event.

    times_ms: forward + backward of each micro-batch on one stage, in the order in which they run.
    A stage begins its next operation once the stage is free and the operation's input has been
    computed: the same forward on the stage before, the same backward on the stage after, and for
    the last stage's backward its own forward.
    """
    orders = [_order(len(times_ms), num_stages - 1 - stage) for stage in range(num_stages)]
    next_operation = [0] * num_stages
    is_busy = [False] * num_stages
    done: set[tuple[int, _Operation]] = set()
    running: list[tuple[float, int]] = []
    now_ms = 0.0

    def start(stage: int) -> None:
        if is_busy[stage] or next_operation[stage] == len(orders[stage]):
            return
        kind, micro_batch = orders[stage][next_operation[stage]]
        if not _has_input(stage, kind, micro_batch, num_stages, done):
            return
        share = forward_share if kind == "F" else 1 - forward_share
        is_busy[stage] = True
        heapq.heappush(running, (now_ms + share * times_ms[micro_batch], stage))

    start(0)
    while running:
        now_ms, stage = heapq.heappop(running)
        done.add((stage, orders[stage][next_operation[stage]]))
        is_busy[stage] = False
        next_operation[stage] += 1
        for neighbour in (stage, stage - 1, stage + 1):
            if 0 <= neighbour < num_stages:
                start(neighbour)
    return now_ms


def _order(num_micro_batches: int, num_ahead: int) -> list[_Operation]:
    """The operations of a stage: ``num_ahead`` forwards, one of each in turn, the backwards."""
    forwards = [("F", k) for k in range(num_micro_batches)]
    backwards = [("B", k) for k in range(num_micro_batches)]
    operations = forwards[:num_ahead]
    rest = forwards[num_ahead:]
    for forward, backward in zip(rest, backwards, strict=False):
        operations += [forward, backward]
    return operations + backwards[len(rest) :]


def _has_input(
    stage: int, kind: str, micro_batch: int, num_stages: int, done: set[tuple[int, _Operation]]
) -> bool:
    if kind == "F":
        return stage == 0 or (stage - 1, ("F", micro_batch)) in done
    if stage == num_stages - 1:
        return (stage, ("F", micro_batch)) in done
    return (stage + 1, ("B", micro_batch)) in done


# --- bounds --------------------------------------------------------------------------------------

FloatArray = NDArray[np.float64]

_NUM_STEPS = 150
"""Steps of the search for good weights; more of them prove little more."""
_FIRST_STEP = 0.5
_NUM_REFINEMENTS = 40
"""Cuts of the interval in which two weights are traded, each to two thirds of its length."""


def proved_strategy_bound_ms(lengths: Sequence[int], replicas: Sequence[SchemeFigures]) -> float:
    """Lower bound for plans on these replicas, in ms; infinity if a sequence fits none.

    A plan of time T has every sequence on a replica whose stages it passes within T. So no plan is
    shorter than the least T that is not below the bound for such plans.
    """
    counts = Counter(replicas)
    passes_ms = sorted(
        {
            _pass_ms(figures, length)
            for figures in counts
            for length in set(lengths)
            if length <= figures.longest
        }
    )
    bounds_ms: dict[int, float] = {}

    def is_reached(place: int) -> bool:
        bounds_ms[place] = _bound_within_ms(lengths, counts, passes_ms[place])
        return bounds_ms[place] <= passes_ms[place]

    # Where more is allowed the bound is lower: the first pass that reaches it can be bisected.
    place = bisect_left(range(len(passes_ms)), True, key=is_reached)
    before_ms = bounds_ms[place - 1] if place > 0 else math.inf
    return min(before_ms, passes_ms[place] if place < len(passes_ms) else math.inf)


def _pass_ms(figures: SchemeFigures, length: int) -> float:
    """Time of a sequence through all stages."""
    return figures.num_stages * figures.time_ms([length])


def _bound_within_ms(
    lengths: Sequence[int], counts: Counter[SchemeFigures], time_ms: float
) -> float:
    """The bound for plans in which no sequence takes longer than a time through all stages."""

    def fits(figures: SchemeFigures, length: int) -> bool:
        return length <= figures.longest and _pass_ms(figures, length) <= time_ms

    distinct = set(lengths)
    longest = {
        figures: max((length for length in distinct if fits(figures, length)), default=0)
        for figures in counts
    }
    cases = [
        _shared_bound_ms(lengths, without_one, longest, all_work=False)
        for without_one in (counts - Counter([figures]) for figures in counts)
        if max((longest[figures] for figures in without_one), default=0) >= max(lengths)
    ]
    if max(longest.values()) >= max(lengths) and len(lengths) >= counts.total():
        cases.append(_shared_bound_ms(lengths, counts, longest, all_work=True))
    return min(cases, default=math.inf)


def _shared_bound_ms(
    lengths: Sequence[int],
    counts: Counter[SchemeFigures],
    longest: Mapping[SchemeFigures, int],
    *,
    all_work: bool,
) -> float:
    """The bound by weights; with all_work no replica is empty.

    longest: the longest sequence that may go to replicas of a scheme, 0 for none.
    """
    schemes = list(counts)
    distinct = Counter(lengths)
    sizes = np.array(list(distinct), dtype=np.float64)
    copies = np.array(list(distinct.values()), dtype=np.float64)
    num_replicas = np.array([counts[figures] for figures in schemes], dtype=np.float64)
    work_ms = np.array(
        [
            np.where(
                sizes <= longest[figures],
                figures.a_ms_per_token2 * np.array(list(map(figures.attended, sizes)))
                + figures.b_ms_per_token * sizes,
                np.inf,
            )
            for figures in schemes
        ]
    )
    share_ms = np.array([figures.c_ms * sizes / max(figures.max_tokens, 1) for figures in schemes])
    if not all_work:
        return _best_ms(work_ms + share_ms, copies, num_replicas, np.zeros(len(schemes)))
    fill_ms = np.array(
        [(figures.num_stages - 1) * figures.time_ms([min(lengths)]) for figures in schemes]
    )
    constant_ms = np.array([figures.c_ms for figures in schemes])
    return max(
        _best_ms(work_ms + share_ms, copies, num_replicas, fill_ms),
        _best_ms(work_ms, copies, num_replicas, fill_ms + constant_ms),
    )


def _best_ms(
    work_ms: FloatArray, copies: FloatArray, num_replicas: FloatArray, fixed_ms: FloatArray
) -> float:
    """The bound for the best weights that a short search finds.

    work_ms: shape (num_schemes, num_lengths), infinite where a length does not fit; copies: shape
    (num_lengths,); num_replicas, fixed_ms: shape (num_schemes,). The bound is concave in the
    weights, so following its slope, and then trading weights in pairs, leads upwards.
    """
    fits = np.isfinite(work_ms)
    finite_ms = np.where(fits, work_ms, 0.0)
    columns = np.arange(len(copies))

    def loads_ms(shares: FloatArray) -> FloatArray:
        """Load of a replica of each scheme if every length goes where it weighs least.

        shares: weight of all replicas of each scheme together, which add up to 1.
        """
        weighted = np.where(fits, (shares / num_replicas)[:, None] * finite_ms, np.inf)
        chosen = weighted.argmin(axis=0)
        taken_ms = copies * finite_ms[chosen, columns]
        return fixed_ms + np.bincount(chosen, taken_ms, len(num_replicas)) / num_replicas

    def bound_ms(shares: FloatArray) -> float:
        return float(shares @ loads_ms(shares))

    best = shares = num_replicas / num_replicas.sum()
    # Trading alone finds the best weights of two schemes.
    for step in range(_NUM_STEPS if len(shares) > 2 else 0):
        loads = loads_ms(shares)
        slope = loads / max(float(loads.max()), np.finfo(np.float64).tiny)
        shares = shares * np.exp(_FIRST_STEP / math.sqrt(1 + step) * slope)
        shares /= shares.sum()
        best = max(best, shares, key=bound_ms)
    for first in range(len(best)):
        for second in range(first):
            best = _traded(bound_ms, best, first, second)
    return bound_ms(best)


def _traded(
    bound_ms: Callable[[FloatArray], float], shares: FloatArray, first: int, second: int
) -> FloatArray:
    """The best division of the weight of two schemes between them."""
    low, high = 0.0, float(shares[first] + shares[second])

    def with_first(share: float) -> FloatArray:
        traded = shares.copy()
        traded[first], traded[second] = share, shares[first] + shares[second] - share
        return traded

    for _ in range(_NUM_REFINEMENTS):
        third = (high - low) / 3.0
        if bound_ms(with_first(low + third)) < bound_ms(with_first(high - third)):
            low += third
        else:
            high -= third
    return max(shares, with_first((low + high) / 2.0), key=bound_ms)


def proved_packing_bound_ms(lengths: Sequence[int], figures: SchemeFigures) -> float:
    """Lower bound for a replica with these sequences, however they are packed, in ms."""
    if not lengths:
        return 0.0
    num_fewest = _fewest_micro_batches(lengths, figures.max_tokens)
    work_ms = math.fsum(figures.time_ms([length]) - figures.c_ms for length in lengths)
    fill_ms = (figures.num_stages - 1) * figures.time_ms([min(lengths)])
    return max(
        work_ms + num_fewest * figures.c_ms + fill_ms,
        figures.num_stages * figures.time_ms([max(lengths)]),
    )


def _fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """Micro-batches that any packing needs: bound L2 of Martello and Toth (1990).

    For a threshold: sequences that leave less room than it have a micro-batch each, those above
    half the limit too, and those from the threshold to half the limit fill up what room is left.
    """
    fewest = -(-sum(lengths) // max(max_tokens, 1))
    half = max_tokens / 2
    for threshold in {length for length in lengths if length <= half} | {0}:
        alone = sum(length > max_tokens - threshold for length in lengths)
        large = [length for length in lengths if half < length <= max_tokens - threshold]
        small = sum(length for length in lengths if threshold <= length <= half)
        excess = small - (len(large) * max_tokens - sum(large))
        fewest = max(fewest, alone + len(large) + max(0, -(-excess // max(max_tokens, 1))))
    return fewest


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
