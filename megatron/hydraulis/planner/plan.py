"""The plan of one iteration: which replica trains which sequences, in which micro-batches.

Plans are immutable and validate themselves. As JSON a plan is::

    {"iteration": 0, "strategy": "tp2+2*tp1", "predicted_time_s": 0.4, "plan_time_s": 0.002,
     "replicas": [{"scheme": {"tp": 2, "cp": 1, "pp": 1}, "ranks": [0, 1],
                   "predicted_time_s": 0.4,
                   "micro_batches": [{"sequences": [0, 3], "lengths": [900, 20]}]}],
     "dispatch": {"objective_s": 0.4, "bound_s": 0.3, "gap": 0.25, "seconds": 0.001,
                  "status": "greedy"},
     "packing": null}

A scheme also has ``layers`` (a list) and ``splits_cp`` (true) where they differ from the default.
A micro-batch of a scheme that splits its cp ranks may have ``groups``, a list of ``[offset, size,
number of sequences]`` that cuts both its cp ranks and its sequences into runs. Where rows are
rounded up, a micro-batch has ``rows``: tokens of the row of each group, or of the only one.
``sequences`` are places in the global batch; a plan that training recorded has ``sequence_ids``:
the id in the corpus of the sequence at each place. A plan that was chosen among several strategies
has ``strategy_times_s``: by name ``bound_s`` and ``found_s``. The key ``version`` may be absent;
it is 1.
"""

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.planner.replica_plan import (
    ContextGroup,
    GroupShare,
    MicroBatch,
    ReplicaPlan,
    check_time,
)
from megatron.hydraulis.strategy import Scheme, Strategy

MS_PER_S = 1e3
_FORMAT_VERSION = 1
# Times are sums of a few thousand floats, which may be added up in another order.
_RELATIVE_TOLERANCE = 1e-9
# Beginnings of the statuses that mark a plan, the worst last. A plan is greedy where the search
# failed, or where the process that searches was lost.
_MARKS = ("time limit", "solver ", "greedy")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """Quality of the answer of one planning stage, dispatch or packing.

    Raises PlanError when the objective is below the bound or a number is negative or not finite.
    """

    objective_s: float
    """Predicted time of the answer."""
    bound_s: float
    """Proved lower limit of that time."""
    seconds: float
    """Time spent searching; not part of a plan's digest."""
    status: str
    """Outcome of the search, for example 'greedy' or 'certified'."""

    def __post_init__(self) -> None:
        check_time("objective_s of a planning stage", self.objective_s)
        check_time("bound_s of a planning stage", self.bound_s)
        check_time("seconds of a planning stage", self.seconds)
        if _is_below(self.objective_s, self.bound_s):
            raise PlanError(
                f"nothing is better than a bound but the objective {self.objective_s} s is below "
                f"the bound {self.bound_s} s; correct the bound"
            )

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 0.0 when both are 0."""
        return _gap(self.objective_s, self.bound_s)

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "objective_s": float(self.objective_s),
            "bound_s": float(self.bound_s),
            "gap": float(self.gap),
            "seconds": float(self.seconds),
            "status": self.status,
        }

    @classmethod
    def from_json(cls, content: JsonObject) -> "StageReport":
        """Read what to_json wrote; PlanError for anything else."""
        report = cls(
            objective_s=content.number("objective_s"),
            bound_s=content.number("bound_s"),
            seconds=content.number("seconds"),
            status=content.text("status"),
        )
        content.number("gap")  # It follows from the others.
        content.check_all_read()
        return report


@dataclass(frozen=True, slots=True)
class StrategyTime:
    """Time of a batch under one strategy, with the overhead of regrouping and optimizer.

    Raises PlanError when a time is negative or not finite, or below its bound.
    """

    name: str
    """Name of the strategy in its pool."""
    bound_s: float
    """Lower bound of the time of any plan with this strategy."""
    found_s: float
    """Predicted time of the best plan found, which is little improved where the strategy was soon
    ruled out."""

    def __post_init__(self) -> None:
        check_time(f"bound_s of strategy {self.name!r}", self.bound_s)
        check_time(f"found_s of strategy {self.name!r}", self.found_s)
        _check_bound(self.name, self.bound_s, self.found_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationPlan:
    """Strategy, dispatch and packing of one iteration.

    Raises PlanError when two micro-batches hold the same sequence, two replicas share a rank,
    or the predicted time is below that of the slowest replica.
    """

    iteration: int
    strategy: str
    """Name of the strategy in its pool."""
    replicas: tuple[ReplicaPlan, ...]
    """Replicas in the order of the strategy, those without sequences included."""
    predicted_time_s: float
    """Makespan over the replicas plus the overhead of regrouping and optimizer."""
    dispatch: StageReport | None = None
    packing: StageReport | None = None
    plan_time_s: float = 0.0
    """Time spent planning; not part of the digest."""
    sequence_ids: tuple[int, ...] | None = None
    """Ids in the corpus, by place in the batch; not part of the digest. None until the plan is
    recorded, as planning knows lengths alone."""
    strategy_times_s: tuple[StrategyTime, ...] = ()
    """Times of every strategy of the pool that holds the batch; not part of the digest. Empty where
    there was no choice."""

    def __post_init__(self) -> None:
        check_time("predicted_time_s of the iteration", self.predicted_time_s)
        check_time("plan_time_s", self.plan_time_s)
        if not self.replicas:
            raise self._error("a plan needs at least 1 replica but has 0; list every replica")
        seen_ranks: set[int] = set()
        seen_sequences: set[int] = set()
        for replica in self.replicas:
            if not seen_ranks.isdisjoint(replica.ranks):
                shared = min(seen_ranks.intersection(replica.ranks))
                raise self._error(
                    f"a rank serves one replica but rank {shared} is in two; "
                    f"take the replicas of the strategy"
                )
            seen_ranks.update(replica.ranks)
            for micro_batch in replica.micro_batches:
                if not seen_sequences.isdisjoint(micro_batch.sequences):
                    shared = min(seen_sequences.intersection(micro_batch.sequences))
                    raise self._error(
                        f"every sequence is trained once but sequence {shared} is in two "
                        f"micro-batches; remove it from one"
                    )
                seen_sequences.update(micro_batch.sequences)
        if self.sequence_ids is not None and len(self.sequence_ids) != len(seen_sequences):
            raise self._error(
                f"every sequence has an id but there are {len(self.sequence_ids)} ids of "
                f"{len(seen_sequences)} sequences; record the plan again"
            )
        if _is_below(self.predicted_time_s, self.makespan_s):
            raise self._error(
                f"an iteration takes at least its makespan but {self.predicted_time_s} s are "
                f"predicted and {self.makespan_s} s for the slowest replica; correct the time"
            )

    def _error(self, message: str) -> PlanError:
        return PlanError(f"plan of iteration {self.iteration + 1}: {message}")

    @property
    def makespan_s(self) -> float:
        """Predicted time of the slowest replica."""
        return max(replica.predicted_time_s for replica in self.replicas)

    @property
    def overhead_s(self) -> float:
        """Time that regrouping and optimizer add to the makespan."""
        return self.predicted_time_s - self.makespan_s

    @property
    def replica_times_s(self) -> tuple[float, ...]:
        """Predicted time of every replica: shape (num_replicas,)."""
        return tuple(replica.predicted_time_s for replica in self.replicas)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of each sequence, by its index."""
        return {
            sequence: length
            for replica in self.replicas
            for micro_batch in replica.micro_batches
            for sequence, length in zip(micro_batch.sequences, micro_batch.lengths, strict=True)
        }

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all replicas."""
        return sum(replica.num_sequences for replica in self.replicas)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all replicas."""
        return sum(replica.num_tokens for replica in self.replicas)

    @property
    def imbalance(self) -> float:
        """Makespan over the rank-weighted mean of the replica times: 1.0 is perfect.

        Idle ranks do not count. 1.0 when nothing is predicted to take time.
        """
        num_ranks = sum(len(replica.ranks) for replica in self.replicas)
        total_s = math.fsum(
            replica.predicted_time_s * len(replica.ranks) for replica in self.replicas
        )
        return self.makespan_s * num_ranks / total_s if total_s > 0.0 else 1.0

    def replica_of(self, rank: int) -> ReplicaPlan | None:
        """The share of the replica that a rank belongs to; None when the rank is idle."""
        for replica in self.replicas:
            if rank in replica.ranks:
                return replica
        return None

    def validate(
        self,
        lengths: Sequence[int],
        strategy: Strategy,
        max_tokens: Callable[[Scheme], int],
    ) -> None:
        """Check the plan against the batch, the strategy and the limits that it was made for.

        lengths: shape (num_sequences,), the global batch; max_tokens: the limit of tokens per
        micro-batch on a scheme, padding included where cp > 1.

        Raises PlanError when the plan is for another strategy, when a sequence is missing,
        unknown or of another length, and when a micro-batch, or a context group of it, exceeds
        the limit of its scheme.
        """
        self._check_strategy(strategy)
        self._check_sequences(lengths)
        limit_of = functools.cache(max_tokens)  # large strategies take long to say theirs
        for index, replica in enumerate(self.replicas):
            for place, micro_batch in enumerate(replica.micro_batches):
                for scheme, share in replica.shares(micro_batch):
                    if share.lengths or share.row_tokens is not None:
                        where = f"micro-batch {place} of replica {index} ({replica.scheme})"
                        self._check_limit(where, scheme, share, limit_of(scheme))

    def _check_limit(self, where: str, scheme: Scheme, share: GroupShare, limit: int) -> None:
        needed = scheme.row_tokens(share.lengths)
        row = needed if share.row_tokens is None else share.row_tokens
        if row < needed or row % scheme.token_quantum:
            raise self._error(
                f"{where} has a row of {row} tokens but its sequences need a multiple of "
                f"{scheme.token_quantum} from {needed} on; plan again"
            )
        with_padding = scheme.cp > 1 or row > needed
        num_tokens = row if with_padding else share.num_tokens
        if num_tokens > limit:
            columns = share.group.columns
            padded = f" with padding on cp ranks {columns[0]} to {columns[-1]}"
            raise self._error(
                f"{where} has {num_tokens} tokens{padded if with_padding else ''} but the limit is "
                f"{limit}; move sequences to other micro-batches"
            )

    def _check_strategy(self, strategy: Strategy) -> None:
        if self.strategy != strategy.name:
            raise self._error(
                f"is for strategy {self.strategy!r} but is used with {strategy.name!r}; "
                f"use the plan's strategy"
            )
        planned = tuple((replica.scheme, replica.ranks) for replica in self.replicas)
        wanted = tuple((replica.scheme, replica.ranks) for replica in strategy.replicas)
        if len(planned) != len(wanted):
            raise self._error(
                f"has {len(planned)} replicas but strategy {strategy.name!r} has {len(wanted)}; "
                f"list every replica, also those without sequences"
            )
        for index, (here, there) in enumerate(zip(planned, wanted, strict=True)):
            if here != there:
                raise self._error(
                    f"replica {index} is {here[0]} on ranks {list(here[1])} but in strategy "
                    f"{strategy.name!r} it is {there[0]} on ranks {list(there[1])}; "
                    f"plan with the strategy that is used"
                )

    def _check_sequences(self, lengths: Sequence[int]) -> None:
        planned = self.lengths
        missing = [sequence for sequence in range(len(lengths)) if sequence not in planned]
        if missing:
            raise self._error(
                f"every sequence is trained once but {len(missing)} of {len(lengths)} are in no "
                f"micro-batch, the first of them {missing[0]}; add them"
            )
        for sequence, length in planned.items():
            if sequence >= len(lengths):
                raise self._error(
                    f"names sequence {sequence} but the batch has {len(lengths)} sequences; "
                    f"name those below {len(lengths)}"
                )
            if length != lengths[sequence]:
                raise self._error(
                    f"sequence {sequence} is planned with {length} tokens but has "
                    f"{lengths[sequence]}; plan with the lengths of this batch"
                )

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the canonical JSON without the seconds spent planning."""
        content = self.to_json()
        del content["plan_time_s"]
        content.pop("sequence_ids", None)
        content.pop("strategy_times_s", None)
        for stage in ("dispatch", "packing"):
            if content[stage] is not None:
                del content[stage]["seconds"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as dicts, lists, numbers and strings."""
        content: dict[str, Any] = {
            "iteration": self.iteration,
            "strategy": self.strategy,
            "predicted_time_s": float(self.predicted_time_s),
            "plan_time_s": float(self.plan_time_s),
            "replicas": [replica.to_json() for replica in self.replicas],
            "dispatch": None if self.dispatch is None else self.dispatch.to_json(),
            "packing": None if self.packing is None else self.packing.to_json(),
        }
        if self.sequence_ids is not None:
            content["sequence_ids"] = list(self.sequence_ids)
        if self.strategy_times_s:
            content["strategy_times_s"] = {
                one.name: {"bound_s": one.bound_s, "found_s": one.found_s}
                for one in self.strategy_times_s
            }
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "IterationPlan":
        """Read a plan; PlanError names what is missing, unknown or of another type."""
        plan = JsonObject(content, "plan", PlanError)
        plan.check_version(_FORMAT_VERSION)
        result = cls(
            iteration=plan.integer("iteration"),
            strategy=plan.text("strategy"),
            replicas=tuple(
                ReplicaPlan.from_json(plan.nested(entry, f"replica {index} of the plan"))
                for index, entry in enumerate(plan.array("replicas"))
            ),
            predicted_time_s=plan.number("predicted_time_s"),
            dispatch=_report_from_json(plan, "dispatch"),
            packing=_report_from_json(plan, "packing"),
            plan_time_s=plan.number("plan_time_s"),
            sequence_ids=plan.integers("sequence_ids") if plan.has("sequence_ids") else None,
            strategy_times_s=_strategy_times(plan),
        )
        plan.check_all_read()
        return result


@dataclass(frozen=True, slots=True)
class PlanText:
    """A plan as JSON text, which goes from where it was made to the ranks without being parsed."""

    strategy: str
    digest: str
    text: str

    @classmethod
    def of(cls, plan: IterationPlan) -> "PlanText":
        """The text of a plan."""
        return cls(plan.strategy, plan.digest, json.dumps(plan.to_json()))

    def parse(self) -> IterationPlan:
        """Read the plan; PlanError if it is damaged or has another digest."""
        plan = IterationPlan.from_json(json.loads(self.text))
        if plan.digest != self.digest:
            raise PlanError(
                f"iteration {plan.iteration + 1}: the plan arrived with digest {plan.digest[:12]} "
                f"but was made with {self.digest[:12]}; all ranks must run the same version"
            )
        return plan


def _strategy_times(plan: JsonObject) -> tuple[StrategyTime, ...]:
    if not plan.has("strategy_times_s"):
        return ()
    times = plan.nested(plan.value("strategy_times_s"), "strategy_times_s of the plan")
    found = []
    for name in times.keys:
        one = times.nested(times.value(name), f"strategy_times_s of {name!r}")
        found.append(StrategyTime(name, one.number("bound_s"), one.number("found_s")))
        one.check_all_read()
    return tuple(found)


def _report_from_json(plan: JsonObject, stage: str) -> StageReport | None:
    content = plan.value(stage)
    if content is None:
        return None
    return StageReport.from_json(plan.nested(content, f"{stage} of the plan"))


def _is_below(time_s: float, bound_s: float) -> bool:
    """True if a time is smaller than its lower bound by more than rounding."""
    return time_s < bound_s and not math.isclose(time_s, bound_s, rel_tol=_RELATIVE_TOLERANCE)


def _check_bound(strategy: str, bound_s: float, found_s: float) -> None:
    if _is_below(found_s, bound_s):
        raise PlanError(
            f"strategy {strategy!r}: nothing is better than a bound but a plan takes {found_s} s "
            f"and the bound is {bound_s} s; correct the bound"
        )


def _gap(time_s: float, bound_s: float) -> float:
    return max(0.0, (time_s - bound_s) / time_s) if time_s > 0.0 else 0.0


def plan_status(plan: IterationPlan) -> str:
    """The worse of the statuses of dispatch and packing; 'unknown' for a plan without reports."""
    statuses = [report.status for report in (plan.dispatch, plan.packing) if report is not None]
    return max(statuses, key=_badness, default="unknown")


def is_marked(status: str) -> bool:
    """True if planning was cut short by a limit, a failing solver or a failing search."""
    return status.startswith(_MARKS)


def _badness(status: str) -> int:
    """Position in the statuses from 'certified' to the worst."""
    beginnings = ("search ended", *_MARKS)
    return next((i for i, each in enumerate(beginnings, 1) if status.startswith(each)), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOutcome:
    """Reason why a strategy of the pool was chosen or not.

    Raises PlanError when the time found is below the bound.
    """

    name: str
    """Name of the strategy in its pool."""
    bound_s: float | None
    """Lower bound of any plan with this strategy; None when it cannot hold the batch."""
    found_s: float | None
    """Predicted time of the best plan found; None when the strategy was not searched."""
    why_not_chosen: str
    """One sentence; empty for the chosen strategy."""

    def __post_init__(self) -> None:
        if self.bound_s is not None and self.found_s is not None:
            _check_bound(self.name, self.bound_s, self.found_s)

    @property
    def gap(self) -> float | None:
        """(found - bound) / found, None when either is missing."""
        if self.bound_s is None or self.found_s is None:
            return None
        return _gap(self.found_s, self.bound_s)

    @property
    def is_chosen(self) -> bool:
        """True if the plan uses this strategy."""
        return not self.why_not_chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanExplanation:
    """A plan and the outcome of every strategy of the pool.

    Raises PlanError unless exactly the plan's strategy is marked as chosen.
    """

    plan: IterationPlan
    strategies: tuple[StrategyOutcome, ...]
    """Outcomes in the order of the pool."""

    def __post_init__(self) -> None:
        chosen = [outcome.name for outcome in self.strategies if outcome.is_chosen]
        if chosen != [self.plan.strategy]:
            raise PlanError(
                f"one strategy is chosen, the plan's, but the plan is for {self.plan.strategy!r} "
                f"and {chosen} are marked as chosen; give every other one a reason"
            )


class Planner(Protocol):
    """Turns the lengths of a global batch into an iteration plan.

    Strategies are compared by makespan plus the overhead of `CostModel.overhead_ms`; micro-batches
    stay within `Limits`. Objectives and bounds of dispatch and packing are about the makespan
    alone, those of an explanation about the predicted time.
    """

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration.

        lengths: shape (num_sequences,), in tokens; a plan identifies sequences by their index
        here. The same lengths always give a plan of the same digest.

        Raises PlanError for an empty batch, a length below 1 and a sequence that no replica of
        any strategy can hold.
        """
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches of a replica in the order in which they run, and the replica's exact time."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Sequences of each, as indices into the batch."""
    time_ms: float
    """Infinite if a micro-batch has no room."""
    groups: tuple[tuple[ContextGroup, ...], ...] = ()
    """Context groups of each micro-batch; empty for a scheme that does not split its cp ranks."""
    rows: tuple[tuple[int, ...], ...] = ()
    """`MicroBatch.rows` of each; empty where rows are not rounded up."""

    def with_lengths(self, lengths: Sequence[int]) -> tuple[MicroBatch, ...]:
        """The micro-batches as a plan has them; lengths: of the batch."""
        nothing = ((),) * len(self.micro_batches)
        each = (self.micro_batches, self.groups or nothing, self.rows or nothing)
        return tuple(
            MicroBatch(share, tuple(lengths[sequence] for sequence in share), groups, rows)
            for share, groups, rows in zip(*each, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The best plan of one strategy, before it is known to be the best of all."""

    strategy: Strategy
    packings: Sequence[Packing]
    """Shape (num_replicas,)."""
    overhead_ms: float
    dispatch: StageReport
    packing: StageReport

    @property
    def makespan_ms(self) -> float:
        """Time of the slowest replica."""
        return max(packing.time_ms for packing in self.packings)

    @property
    def time_ms(self) -> float:
        """Predicted time of the iteration."""
        return self.makespan_ms + self.overhead_ms

    def to_plan(self, iteration: int, lengths: Sequence[int], start_s: float) -> IterationPlan:
        """lengths: of the batch; start_s: when planning began, by time.perf_counter."""
        return IterationPlan(
            iteration=iteration,
            strategy=self.strategy.name,
            replicas=tuple(
                ReplicaPlan(
                    scheme=replica.scheme,
                    ranks=replica.ranks,
                    micro_batches=_largest_last(replica.scheme, packing.with_lengths(lengths)),
                    predicted_time_s=packing.time_ms / MS_PER_S,
                )
                for replica, packing in zip(self.strategy.replicas, self.packings, strict=True)
            ),
            predicted_time_s=self.time_ms / MS_PER_S,
            dispatch=self.dispatch,
            packing=self.packing,
            plan_time_s=time.perf_counter() - start_s,
        )


def _largest_last(scheme: Scheme, micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    """Moves the longest last on one stage, as its backward hides most of the scatters and the order
    costs nothing; a pipeline's order is part of its time."""
    if scheme.pp > 1:
        return micro_batches
    return tuple(sorted(micro_batches, key=lambda micro_batch: sum(micro_batch.lengths)))
