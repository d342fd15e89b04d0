"""The work of the ranks in one iteration: micro-batches as they are computed, with padding."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.cost_model.pipeline import StageCosts, pipeline_time_ms
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import MicroBatch
from megatron.hydraulis.strategy import Scheme, Strategy


@dataclass(frozen=True)
class CeilingCosts:
    """CostModel in which all ranks share every token and all attention evenly."""

    all_ranks: Coefficients

    @classmethod
    def of(cls, costs: StageCosts, schemes: Iterable[Scheme], num_ranks: int) -> CeilingCosts:
        """At the least rank time per token, and per squared token, of any of the schemes."""
        a_ms, b_ms, window = [], [], None
        for scheme in schemes:
            stages = costs.coefficients(scheme)
            share = scheme.tp * scheme.cp / num_ranks
            a_ms.append(share * sum(stage.a_ms_per_token2 for stage in stages))
            b_ms.append(share * sum(stage.b_ms_per_token for stage in stages))
            window = stages[0].window
        return cls(Coefficients(min(a_ms), min(b_ms), 0.0, window))

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Of all ranks together, whatever the scheme."""
        return self.all_ranks

    def max_tokens(self, scheme: Scheme) -> int:
        """Memory does not limit it."""
        return sys.maxsize

    def overhead_ms(self, strategy: Strategy) -> float:
        """Nothing."""
        return 0.0


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """One micro-batch as a device computes it.

    Raises PlanError for negative padding and for a micro-batch without trained tokens.
    """

    num_tokens: int
    """Trained tokens."""
    segments: tuple[int, ...]
    """Lengths of the rows' segments as attention computes them, in tokens."""
    num_padding: int = 0
    """Computed tokens that are not trained."""
    groups: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """cp, tokens and segments of each group of a wave, whose cp ranks run in groups; 0 and none for
    a group without sequences. A wave takes as long as its slowest group."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not self.segments or self.num_padding < 0:
            raise PlanError(
                f"a micro-batch has at least 1 trained token and no negative padding but there are "
                f"{self.num_tokens} tokens, {len(self.segments)} segments and {self.num_padding} "
                f"tokens of padding; leave empty micro-batches out"
            )

    @classmethod
    def packed(cls, lengths: Sequence[int], *, num_padding: int = 0) -> MicroBatchWork:
        """Sequences without attention to each other, and padding without attention."""
        return cls(sum(lengths), tuple(lengths), num_padding)

    @classmethod
    def wave(cls, groups: Sequence[tuple[int, MicroBatchWork | None]]) -> MicroBatchWork:
        """Micro-batches of groups of cp ranks, which run at the same time; None for no sequence."""
        works = [work for _, work in groups if work is not None]
        return cls(
            sum(work.num_tokens for work in works),
            tuple(itertools.chain.from_iterable(work.segments for work in works)),
            sum(work.num_padding for work in works),
            tuple(
                (cp, 0, ()) if work is None else (cp, work.num_computed, work.segments)
                for cp, work in groups
            ),
        )

    @property
    def num_computed(self) -> int:
        """Trained tokens and padding."""
        return self.num_tokens + self.num_padding

    @classmethod
    def of_plan(cls, micro_batch: MicroBatch) -> MicroBatchWork:
        """A plan's micro-batch, with the padding of rows that are rounded up."""
        width = sum(group.size for group in micro_batch.groups)
        shares = micro_batch.shares(width) if micro_batch.groups else ()
        groups = (
            (
                share.group.size,
                share.num_tokens if share.row_tokens is None else share.row_tokens,
                share.lengths,
            )
            for share in shares
        )
        num_padding = sum(micro_batch.rows) - micro_batch.num_tokens if micro_batch.rows else 0
        packed = cls.packed(micro_batch.lengths, num_padding=num_padding)
        return replace(packed, groups=tuple(groups))

    def rows(self, scheme: Scheme) -> list[tuple[Scheme, int]]:
        """Tokens of each row, and the scheme that it runs as, on a replica of a scheme."""
        groups = [(cp, num_tokens) for cp, num_tokens, _ in self.groups]
        return [
            (scheme.of_context_group(cp), num_tokens)
            for cp, num_tokens in groups or [(scheme.cp, self.num_computed)]
        ]

    def times_ms(
        self, scheme: Scheme, stages: Callable[[Scheme], Sequence[Coefficients]]
    ) -> list[float]:
        """Forward and backward on every stage of a replica: shape (pp,).

        stages: the coefficients of each stage of a scheme.
        """
        if not self.groups:
            return [self.time_ms(coefficients) for coefficients in stages(scheme)]
        groups_ms = [
            [each.time_ms(segments, num_tokens) for each in stages(scheme.of_context_group(cp))]
            for cp, num_tokens, segments in self.groups
        ]
        return [max(of_stage) for of_stage in zip(*groups_ms, strict=True)]

    def time_ms(self, coefficients: Coefficients) -> float:
        """Forward and backward on a stage of these coefficients, without groups."""
        return coefficients.time_ms(self.segments, self.num_computed)


@dataclass(frozen=True, slots=True)
class IterationWork:
    """Strategy, dispatch and packing of one iteration, from whatever source.

    Raises PlanError unless there is a list of micro-batches for every replica and the planning time
    is not negative.
    """

    strategy: Strategy
    replicas: tuple[tuple[MicroBatchWork, ...], ...]
    """Micro-batches of each replica of the strategy, in the order in which they run."""
    plan_time_s: float = 0.0
    """Time of planning; 0.0 if no planner is needed."""

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.strategy.replicas):
            raise PlanError(
                f"work for strategy {self.strategy.name!r}: every replica has a list of "
                f"micro-batches, which may be empty, but there are {len(self.replicas)} lists for "
                f"{len(self.strategy.replicas)} replicas; give one per replica"
            )
        if not self.plan_time_s >= 0.0:
            raise PlanError(
                f"work for strategy {self.strategy.name!r}: planning takes at least 0 s but "
                f"plan_time_s is {self.plan_time_s}; correct it"
            )

    @classmethod
    def of_plan(
        cls, plan: IterationPlan, strategy: Strategy, *, plan_time_s: float | None = None
    ) -> IterationWork:
        """A plan's micro-batches; plan_time_s replaces the plan's own."""
        replicas = tuple(
            tuple(map(MicroBatchWork.of_plan, replica.micro_batches)) for replica in plan.replicas
        )
        return cls(strategy, replicas, plan.plan_time_s if plan_time_s is None else plan_time_s)

    def makespan_ms(self, cost_model: CostModel) -> float:
        """Of the slowest replica if all its stages are as slow as the slowest, as in plans."""

        def replica_ms(scheme: Scheme, rows: Sequence[MicroBatchWork]) -> float:
            of_rows_ms = [
                row.times_ms(scheme, lambda each: (cost_model.coefficients(each),))[0]
                for row in rows
            ]
            share = cost_model.coefficients(scheme).forward_share
            return pipeline_time_ms(of_rows_ms, scheme.pp, forward_share=share)

        replicas = zip(self.strategy.replicas, self.replicas, strict=True)
        return max(replica_ms(replica.scheme, rows) for replica, rows in replicas)

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all replicas."""
        return sum(batch.num_tokens for replica in self.replicas for batch in replica)

    @property
    def row_shapes(self) -> frozenset[tuple[Scheme, int]]:
        """The different rows, as a rank's kernels see them: scheme and tokens, padding included."""
        return frozenset(
            (scheme, scheme.row_tokens((num_tokens,)))
            for replica, micro_batches in zip(self.strategy.replicas, self.replicas, strict=True)
            for batch in micro_batches
            for scheme, num_tokens in batch.rows(replica.scheme)
        )

    @property
    def num_padding(self) -> int:
        """Padding of all replicas, in tokens."""
        return sum(batch.num_padding for replica in self.replicas for batch in replica)
