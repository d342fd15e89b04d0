"""Costs that the planner reads: of a scheme, of the strategies of a pool, and of waves.

A replica of width W (``cpW~``) runs **waves**: micro-batches whose W columns are divided into
groups of 1, 2, 4, … columns, each with its own sequences. A column is the tp·pp ranks of one cp
coordinate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron.hydraulis.cost_model.interface import FORWARD_SHARE, Coefficients, CostModel
from megatron.hydraulis.cost_model.limits import Limits, RowRounding
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.planner.plan import Candidate
from megatron.hydraulis.strategy import Pool, Scheme, Strategy


class Pipeline(NamedTuple):
    """Parameters of the time of micro-batches under 1F1B besides their works."""

    num_stages: int
    forward_share: float = FORWARD_SHARE

    def time_ms(self, times_ms: Sequence[float]) -> float:
        """See pipeline_time_ms."""
        return pipeline_time_ms(times_ms, self.num_stages, forward_share=self.forward_share)


_ONE_STAGE = Pipeline(1)


@dataclass(frozen=True, slots=True)
class ViewCoefficients(Coefficients):
    """One form y of several, in which long sequences count what they take longer in another one.

    Let x be a form with a_x >= a_y, L the limit of tokens, and ``d = max(0, b_y - b_x)``. Then
    ``y(s) <= x(s) + d·s`` for the work of every sequence, and a sequence may count as
    ``x(s) + d·s + min(0, c_x - c_y - d·L)`` where that is more than y(s): if none does, the works
    of a micro-batch and c_y are its time in form y, and if some do, at most that in form x, as its
    sequences have at most L tokens. x is the form of which a sequence of L tokens counts most.
    Works per token do not fall with the length, as in one form.
    """

    of_other: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of form x, the factors of s² and s and the constant in ms."""

    @staticmethod
    def of(form: Coefficients, forms: Iterable[Coefficients], max_tokens: int) -> Coefficients:
        """The view of one of the forms of a scheme with this limit."""

        def counted(other: Coefficients) -> tuple[float, float, float]:
            joined = max(0.0, form.b_ms_per_token - other.b_ms_per_token)
            constant_ms = min(0.0, other.c_ms - form.c_ms - joined * max_tokens)
            return other.a_ms_per_token2, other.b_ms_per_token + joined, constant_ms

        def most_ms(of_other: tuple[float, float, float]) -> float:
            by_square, by_token, constant_ms = of_other
            return float(by_square * form.squared(max_tokens) + by_token * max_tokens) + constant_ms

        able = (each for each in forms if each.a_ms_per_token2 >= form.a_ms_per_token2)
        return ViewCoefficients(
            form.a_ms_per_token2,
            form.b_ms_per_token,
            form.c_ms,
            form.window,
            form.forward_share,
            of_other=max(map(counted, able), key=most_ms),
        )

    def sequence_time_ms(self, length: Any) -> Any:
        squared = self.squared(length)
        time_ms = self.a_ms_per_token2 * squared + self.b_ms_per_token * length
        by_square, by_token, constant_ms = self.of_other
        other_ms = by_square * squared + by_token * length + constant_ms
        return (np.maximum if isinstance(length, np.ndarray) else max)(time_ms, other_ms)

    def token_time_ms(self, length: Any) -> Any:
        return self.sequence_time_ms(length) / length


@dataclass(frozen=True)
class SchemeCost:
    """Cost and limit of a scheme.

    With waves, coefficients and max_tokens are limits: no wave with the same sequences is faster,
    and none holds more. That is enough for bounds and for dispatch.

    Costs of several forms have `views`, each of one form. No micro-batch and no replica is faster
    than in any of its views, so a bound of a view is a bound.
    """

    coefficients: Coefficients
    max_tokens: int
    """Limit of tokens per micro-batch."""
    num_stages: int
    multiple: int = 1
    """Each sequence is padded to a multiple of this; max_tokens is one."""
    waves: WaveCosts | None = None
    """None unless the scheme's columns are grouped separately for every micro-batch."""
    rows: RowRounding | None = None
    """None if rows are not rounded up; groups of waves have their own."""

    @property
    def pipeline(self) -> Pipeline:
        """Its 1F1B."""
        return Pipeline(self.num_stages, self.coefficients.forward_share)

    @functools.cached_property
    def views(self) -> tuple[SchemeCost, ...]:
        """The cost with each form of its coefficients alone; the host is one without stages, which
        waits for nobody."""
        forms = self.coefficients.forms
        if len(forms) == 1 and not self.coefficients.host_ms:
            return (self,)
        views = [
            replace(self, coefficients=ViewCoefficients.of(form, forms, self.max_tokens))
            for form in forms
        ]
        if self.coefficients.host_ms:
            host = replace(forms[0], a_ms_per_token2=0.0, b_ms_per_token=0.0)
            host = replace(host, c_ms=self.coefficients.host_ms)
            views.append(replace(self, coefficients=host, num_stages=1))
        return tuple(views)

    @property
    def only_number_counts(self) -> bool:
        """True if the time does not depend on which sequences share a micro-batch."""
        return self.num_stages == 1 and not self.coefficients.others

    @property
    def longest(self) -> int:
        """The longest sequence that fits."""
        return self.max_tokens if self.waves is None else self.waves.longest

    def tokens(self, lengths: Sequence[int]) -> Sequence[int]:
        """The lengths with padding."""
        if self.multiple == 1:
            return lengths
        return [-(-length // self.multiple) * self.multiple for length in lengths]

    def sequence_time_ms(self, length: int) -> float:
        """Time that one sequence adds to its micro-batch on one stage, in the first form."""
        time_ms: float = self.coefficients.sequence_time_ms(length)
        return time_ms

    def time_ms(self, lengths: Sequence[int]) -> float:
        """Time of a micro-batch on one stage, in a row that is rounded up.

        Bounds leave that padding out: a bound of shorter rows holds for longer ones.
        """
        return _time_ms(self.coefficients, self.rows, lengths)

    def replica_time_ms(self, times_ms: Sequence[float]) -> float:
        """Time of a replica whose micro-batches, in their order, take these times."""
        return max(self.pipeline.time_ms(times_ms), len(times_ms) * self.coefficients.host_ms)

    def largest_time_ms(self, longest: int) -> float:
        """Upper limit for a micro-batch, in the first form: filled with sequences of the longest
        length."""
        per_token_ms: float = self.coefficients.token_time_ms(min(longest, self.max_tokens))
        return per_token_ms * self.max_tokens + self.coefficients.c_ms


def _time_ms(coefficients: Coefficients, rows: RowRounding | None, lengths: Sequence[int]) -> float:
    return coefficients.time_ms(lengths, None if rows is None else rows.row_tokens(lengths))


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas of equal cost."""

    cost: SchemeCost
    replicas: tuple[int, ...]
    """Their indices in the strategy."""

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @staticmethod
    def of(costs: Sequence[SchemeCost]) -> tuple[ReplicaClass, ...]:
        """The classes of replicas with these costs, in the order of their first replica."""
        members: dict[SchemeCost, list[int]] = {}
        for replica, cost in enumerate(costs):
            members.setdefault(cost, []).append(replica)
        return tuple(ReplicaClass(cost, tuple(places)) for cost, places in members.items())


class PoolCosts:
    """Costs of every scheme in every strategy of a pool; limits default to the cost model's.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(self, pool: Pool, cost_model: CostModel, limits: Limits | None = None) -> None:
        self.pool = pool
        self.limits = limits or Limits(cost_model)
        self.overheads_ms = {
            strategy.name: cost_model.overhead_ms(strategy) for strategy in pool.strategies
        }
        """Time of an iteration besides its makespan, by name of the strategy."""
        self._costs = {
            (strategy.name, scheme): scheme_cost(scheme, strategy, cost_model, self.limits)
            for strategy in pool.strategies
            for scheme in strategy.schemes
        }

    def replica_costs(self, strategy: Strategy) -> list[SchemeCost]:
        """Shape (num_replicas,), equal for replicas of one scheme."""
        return [self._costs[strategy.name, replica.scheme] for replica in strategy.replicas]

    def with_rows(self, candidate: Candidate, batch: Sequence[int]) -> Candidate:
        """The candidate with the tokens of its rows where they are rounded up.

        Its times already count them.
        """
        if self.limits.row_quantum == 1:
            return candidate
        strategy = candidate.strategy
        packings = [
            replace(
                packing,
                rows=tuple(
                    tuple(
                        self.limits.row_tokens(strategy, of_group, share.lengths)
                        for of_group, share in micro_batch.shares_of(replica.scheme)
                    )
                    for micro_batch in packing.with_lengths(batch)
                ),
            )
            for replica, packing in zip(strategy.replicas, candidate.packings, strict=True)
        ]
        return replace(candidate, packings=packings)

    def feasible_strategies(self, batch: Sequence[int], iteration: int) -> list[Strategy]:
        """The strategies whose replicas all hold their weights and one the longest sequence.

        Raises PlanError when there is none.
        """
        longest = max(batch)
        with_room = [s for s in self.pool.strategies if min(self._limits(s)) > 0]
        feasible = [s for s in with_room if max(self._limits(s)) >= longest]
        if feasible:
            return feasible
        if not with_room:
            first = self.pool.strategies[0]
            scheme = next(s for s in first.schemes if self._costs[first.name, s].longest == 0)
            raise PlanError(
                f"plan of iteration {iteration + 1}: every replica needs room for its weights and "
                f"a token but in each of {len(self.pool.strategies)} strategies some scheme has "
                f"none, in {first.name!r} {scheme}; use larger degrees"
            )
        strategy = max(with_room, key=lambda s: max(self._limits(s)))
        raise PlanError(
            f"plan of iteration {iteration + 1}: a sequence must fit one micro-batch but sequence "
            f"{batch.index(longest)} has {longest} tokens and the largest limit, in strategy "
            f"{strategy.name!r}, is {max(self._limits(strategy))}; split or drop long sequences, "
            f"raise the limit of tokens per micro-batch, or add a replica with a larger tp or cp"
        )

    def _limits(self, strategy: Strategy) -> list[int]:
        return [self._costs[strategy.name, scheme].max_tokens for scheme in strategy.schemes]


def scheme_cost(
    scheme: Scheme, strategy: Strategy, cost_model: CostModel, limits: Limits
) -> SchemeCost:
    """The cost of a replica of the strategy, or of a group of its cp ranks.

    Raises StrategyError if the cost model does not know it.
    """
    if scheme.splits_cp:
        waves = _wave_costs(scheme, strategy, cost_model, limits)
        return SchemeCost(
            coefficients=binding_forms(waves.mean_coefficients, waves.most_tokens),
            max_tokens=waves.most_tokens,
            num_stages=scheme.pp,
            waves=waves,
        )
    limit = limits.max_tokens(strategy, scheme)
    max_tokens = limit if scheme.cp == 1 else scheme.rounded_down(limit)
    return SchemeCost(
        coefficients=binding_forms(cost_model.coefficients(scheme), max_tokens),
        max_tokens=max_tokens,
        num_stages=scheme.pp,
        multiple=1 if scheme.cp == 1 else 2 * scheme.cp,
        rows=limits.row_rounding(strategy, scheme),
    )


def undominated[T](items: Iterable[T], dominates: Callable[[T, T], bool]) -> list[T]:
    """The items that no other one dominates, the first of those that dominate one another."""
    kept: list[T] = []
    for item in items:
        if not any(dominates(other, item) for other in kept):
            kept = [other for other in kept if not dominates(item, other)]
            kept.append(item)
    return kept


def binding_forms(coefficients: Coefficients, max_tokens: int) -> Coefficients:
    """The coefficients without forms and host that are not the longest for any micro-batch.

    Times of a micro-batch are affine in Σ s² and Σ s, so a form is never longer than another one if
    it is not for no tokens, and for all tokens with Σ s² at its least and at its most.
    """
    all_tokens, squares = float(max_tokens), float(coefficients.squared(max_tokens))
    corners = ((0.0, 0.0), (0.0, all_tokens), (squares, all_tokens))

    def is_never_shorter(form: Coefficients, other: Coefficients) -> bool:
        return all(form.time_of_sums_ms(*at) >= other.time_of_sums_ms(*at) for at in corners)

    forms = undominated(coefficients.forms, is_never_shorter)
    host_ms = coefficients.host_ms
    if host_ms <= max(form.c_ms for form in forms):
        host_ms = 0.0  # Each micro-batch takes at least its constant.
    return replace(forms[0], others=tuple(forms[1:]), host_ms=host_ms)


def _wave_costs(
    scheme: Scheme, strategy: Strategy, cost_model: CostModel, limits: Limits
) -> WaveCosts:
    """Groups of a size that the cost model does not know can hold nothing."""
    full_width = cost_model.coefficients(scheme)
    groups = []
    for size in (1 << i for i in range(scheme.cp.bit_length())):
        of_group = scheme.of_context_group(size)
        try:
            coefficients = cost_model.coefficients(of_group)
            limit = limits.max_tokens(strategy, of_group)
            rows = limits.row_rounding(strategy, of_group)
        except StrategyError:
            coefficients, limit, rows = full_width, 0, None
        groups.append(GroupCost(size, coefficients, limit, tp=scheme.tp, rows=rows))
    return WaveCosts(tuple(groups), Pipeline(scheme.pp, full_width.forward_share))


def checked_batch(lengths: Sequence[int], iteration: int) -> list[int]:
    """The lengths as Python ints, as numpy's do not go into JSON.

    Raises PlanError for an empty batch and for a length below 1.
    """
    batch = [int(length) for length in lengths]
    if not batch:
        raise PlanError(
            f"plan of iteration {iteration + 1}: a batch holds at least 1 sequence but has 0; "
            f"plan only batches with sequences"
        )
    if min(batch) < 1:
        raise PlanError(
            f"plan of iteration {iteration + 1}: a sequence has at least 1 token but sequence "
            f"{batch.index(min(batch))} has {min(batch)}; drop empty sequences from the batch"
        )
    return batch


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Cost of a group of columns; raises ValueError for a size that is not a power of two."""

    size: int
    """Number of columns."""
    coefficients: Coefficients
    """Coefficients of the scheme with this cp, on one stage."""
    max_tokens: int
    """Limit of the group's row, padding included; 0 where not even the weights fit."""
    tp: int = 1
    """The row is padded to a multiple of tp·2·size where size > 1: see Scheme.row_tokens."""
    rows: RowRounding | None = None
    """None if rows are not rounded up."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1):
            raise ValueError(f"a group has 1, 2, 4, … columns, not {self.size}")

    @property
    def multiple(self) -> int:
        """Each sequence is padded to a multiple of this."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def room_tokens(self) -> int:
        """Limit of the padded sequences, so that the padded row keeps max_tokens."""
        quantum = Scheme(self.tp, self.size).token_quantum
        return self.max_tokens - self.max_tokens % quantum if self.size > 1 else self.max_tokens

    def padded(self, length: int) -> int:
        """Length of a sequence with padding."""
        return -(-length // self.multiple) * self.multiple

    def time_ms(self, lengths: Sequence[int]) -> float:
        """Time of sequences of these lengths on one stage, in a row that is rounded up."""
        return _time_ms(self.coefficients, self.rows, lengths)


@dataclass(frozen=True, slots=True)
class WaveCosts:
    """The groups that a replica's width may be divided into.

    Raises ValueError unless the sizes are 1, 2, 4, … up to the width.
    """

    groups: tuple[GroupCost, ...]
    """Groups by rising size; the last one has the full width."""
    pipeline: Pipeline = _ONE_STAGE

    def __post_init__(self) -> None:
        if [group.size for group in self.groups] != [2**i for i in range(len(self.groups))]:
            raise ValueError("the sizes of groups are 1, 2, 4, … up to the width")

    @property
    def usable(self) -> tuple[GroupCost, ...]:
        """The groups that can hold a sequence."""
        return tuple(group for group in self.groups if group.room_tokens >= group.multiple)

    @property
    def width(self) -> int:
        """Number of columns of the replica."""
        return self.groups[-1].size

    @property
    def longest(self) -> int:
        """The longest sequence that some group holds."""
        return max(group.room_tokens - group.room_tokens % group.multiple for group in self.groups)

    @property
    def most_tokens(self) -> int:
        """Limit of a wave, whatever its groups."""
        return max(self.width // group.size * group.room_tokens for group in self.groups)

    @property
    def host_ms(self) -> float:
        """Time of the host to issue a wave: that of the full width."""
        return self.groups[-1].coefficients.host_ms

    @property
    def forms(self) -> tuple[tuple[Coefficients, ...], ...]:
        """Forms of every size, shape (num_forms, num_sizes): a size with fewer repeats its last."""
        forms = [group.coefficients.forms for group in self.groups]
        longest = range(max(map(len, forms)))
        return tuple(tuple(of_size[min(k, len(of_size) - 1)] for of_size in forms) for k in longest)

    @property
    def mean_coefficients(self) -> Coefficients:
        """Coefficients of a micro-batch that is no slower than any wave with the same sequences.

        The time of a wave is at least the mean over its columns, and a sequence takes at least
        ``min_c (a_c·c·s² + b_c·c·s) / W`` of it; a group without sequences takes its c_c. Any form
        of each group will do, so there is a mean of the first ones, one of the second ones, ….
        Of rings that of the first ones, the device's, is nearly all that holds of every wave: short
        sequences may run in groups of one column, which exchange nothing. What long ones take
        longer in wide groups is for wave_bounds.py.
        """
        first, *others = map(self._mean, self.forms)
        return replace(first, others=tuple(others), host_ms=self.host_ms)

    def _mean(self, forms: Sequence[Coefficients]) -> Coefficients:
        """forms: one of each size."""
        usable = self.usable or self.groups
        groups = [
            (group.size, form)
            for group, form in zip(self.groups, forms, strict=True)
            if group in usable
        ]
        return Coefficients(
            a_ms_per_token2=min(size * form.a_ms_per_token2 for size, form in groups) / self.width,
            b_ms_per_token=min(size * form.b_ms_per_token for size, form in groups) / self.width,
            c_ms=min(form.c_ms for _, form in groups),
            window=groups[0][1].window,
            forward_share=self.pipeline.forward_share,
        )

    def replica_time_ms(self, times_ms: Sequence[float]) -> float:
        """Time of a replica whose waves, in their order, take these times."""
        return max(self.pipeline.time_ms(times_ms), len(times_ms) * self.host_ms)

    def wave_time_ms(self, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
        """Time of a wave on one stage; groups: (size, lengths) of each."""
        by_size = {group.size: group for group in self.groups}
        return max(by_size[size].time_ms(lengths) for size, lengths in groups)
