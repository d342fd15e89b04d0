"""A cost model as one strategy of a pool sees it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel, given_limit
from megatron.hydraulis.strategy import Scheme, Strategy

__all__ = [
    "CappedCostModel",
    "MemoryTrial",
    "StrategyCosts",
    "after_failure",
    "allowed_tokens",
    "caps_of_schemes",
    "lower",
    "with_lower_limits",
]


@dataclass(frozen=True, slots=True)
class StrategyCosts:
    """Times and limits of the schemes of one strategy: the strategy's own limits come first."""

    cost_model: CostModel
    strategy: Strategy

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The time of a micro-batch on the slowest stage of a scheme; as the cost model says."""
        return self.cost_model.coefficients(scheme)

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch: what the strategy says, else what the cost model says.

        What it says of ``cp8~`` holds for a group of c of its cp ranks as c/8 of it.
        """
        limit = self.strategy.token_limit(scheme)
        if limit is None and scheme not in self.strategy.schemes:
            limit = self._limit_as_group(scheme)
        return self.cost_model.max_tokens(scheme) if limit is None else limit

    def _limit_as_group(self, scheme: Scheme) -> int | None:
        """The strategy's limit of a scheme that splits its cp ranks into groups like this one."""
        for split, limit in self.strategy.token_limits:
            if split.splits_cp and split.of_context_group(scheme.cp) == scheme:
                return given_limit(limit * scheme.cp // split.cp, scheme)
        return None

    @property
    def overhead_ms(self) -> float:
        """What an iteration with this strategy takes beside its makespan."""
        return self.cost_model.overhead_ms(self.strategy)


SHARE_AFTER_FAILURE = 0.75
"""What of a micro-batch that found no memory the next one may hold at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTrial:
    """What micro-batches of a scheme took on one rank, as many as are in flight at a time."""

    num_tokens: int
    """Of each, over all cp ranks, padding included."""
    idle_bytes: int
    """Before they were run, by this rank and whatever shares its device."""
    peak_bytes: int
    """Most while they ran."""
    capacity_bytes: int
    """What there is."""

    @property
    def bytes_per_token(self) -> float:
        """The slope of the line through the two measurements."""
        return max(0, self.peak_bytes - self.idle_bytes) / self.num_tokens

    def predicted_bytes(self, num_tokens: int) -> int:
        """Peak with micro-batches of so many tokens."""
        return round(self.idle_bytes + self.bytes_per_token * num_tokens)


def allowed_tokens(limit: int, scheme: Scheme, trials: Iterable[MemoryTrial]) -> int:
    """Most tokens of a micro-batch by the measurements of all ranks; never more than the limit.

    A multiple of the scheme's token_quantum where it is less; 0 where not even one fits.
    """
    allowed = limit
    for trial in trials:
        if trial.predicted_bytes(allowed) <= trial.capacity_bytes:
            continue
        free = max(0, trial.capacity_bytes - trial.idle_bytes)
        fitting = int(free / trial.bytes_per_token) if trial.bytes_per_token else 0
        allowed = min(allowed, fitting // scheme.token_quantum * scheme.token_quantum)
    return allowed


def after_failure(num_tokens: int, scheme: Scheme) -> int:
    """A limit below a micro-batch that found no memory; 0 where there is none."""
    return int(num_tokens * SHARE_AFTER_FAILURE) // scheme.token_quantum * scheme.token_quantum


def caps_of_schemes(strategy: Strategy, allowed: Mapping[Scheme, int]) -> dict[Scheme, int]:
    """What measured limits mean to the schemes of a strategy, and to their context groups.

    Args:
        strategy: the one in which they were measured.
        allowed: most tokens by what was measured, schemes without ``~``: ``cp8~`` runs as cp 8, 4,
            2 and 1, and what each of them holds was measured by itself.

    Returns:
        The same, and of a scheme with ``~`` what all its cp ranks hold together.
    """
    whole = {scheme: scheme.of_context_group(scheme.cp) for scheme in strategy.schemes}
    return dict(allowed) | {
        scheme: allowed[group] for scheme, group in whole.items() if group in allowed
    }


def lower(caps: Mapping[Scheme, int], more: Mapping[Scheme, int]) -> dict[Scheme, int]:
    """Of each scheme the lower cap."""
    return {
        scheme: min(found for found in (caps.get(scheme), more.get(scheme)) if found is not None)
        for scheme in (*caps, *more)
    }


@dataclass(frozen=True, slots=True)
class CappedCostModel:
    """A cost model whose limits are no higher than memory allows; all else is the base's."""

    base: CostModel
    caps: tuple[tuple[Scheme, int], ...]

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The base's."""
        return self.base.coefficients(scheme)

    def max_tokens(self, scheme: Scheme) -> int:
        """The base's, or the cap where that is lower."""
        limit = self.base.max_tokens(scheme)
        cap = dict(self.caps).get(scheme)
        return limit if cap is None else min(limit, cap)

    def overhead_ms(self, strategy: Strategy) -> float:
        """The base's."""
        return self.base.overhead_ms(strategy)


def with_lower_limits(strategy: Strategy, caps: Mapping[Scheme, int]) -> Strategy | None:
    """A strategy whose own limits are no higher than the caps; None where one would be below 1."""
    limits = tuple(
        (scheme, min(limit, _own_cap(scheme, caps, limit)))
        for scheme, limit in strategy.token_limits
    )
    if any(caps.get(scheme, 1) < 1 for scheme in strategy.schemes):
        return None
    if any(limit < 1 for _, limit in limits):
        return None
    return replace(strategy, token_limits=limits)


def _own_cap(scheme: Scheme, caps: Mapping[Scheme, int], limit: int) -> int:
    """A strategy's own limit of ``cp8~`` holds for a group of c as c/8 of it: each caps it."""
    of_groups = (
        caps[group] * scheme.cp // group.cp for group in scheme.group_schemes if group in caps
    )
    return min(caps.get(scheme, limit), min(of_groups, default=limit))
