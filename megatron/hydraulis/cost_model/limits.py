"""How many tokens a micro-batch may hold: limits that are set, that fit in memory, that were
measured.

Measured memory of a rank is assumed to be linear in the tokens of a micro-batch, as in the memory
model (memory.py).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Scheme, Strategy

SHARE_AFTER_FAILURE = 0.75
"""Limit after a micro-batch ran out of memory, as a share of its tokens."""
CUDA_ROW_QUANTUM = 128
"""Default of --row-quantum-tokens on CUDA, where kernels may be prepared for each new size of a
row: a sixth of the sizes for 0.4 % more time (docs/results.md, section Row sizes)."""


@dataclass(frozen=True, slots=True)
class RowRounding:
    """Rounds the rows of a scheme up, so that they have few different sizes."""

    scheme: Scheme
    quantum_tokens: int
    """Rows are multiples of this, a multiple of the scheme's token_quantum."""
    limit_tokens: int
    """Rows are not rounded up beyond this: a limit that is no such multiple is one more size, and
    rounding never makes a micro-batch exceed its limit."""

    def row_tokens(self, lengths: Iterable[int]) -> int:
        """Tokens of the row in which sequences of these lengths run, padding included."""
        return int(self.rounded(self.scheme.row_tokens(lengths)))

    def rounded(self, num_tokens: ArrayLike) -> NDArray[np.int64]:
        """Tokens of rows that hold num_tokens, which may be above the limit; the same shape."""
        needed = np.asarray(num_tokens, dtype=np.int64)
        multiple = -(-needed // self.quantum_tokens) * self.quantum_tokens
        return np.maximum(needed, np.minimum(multiple, self.limit_tokens))


@dataclass(frozen=True, slots=True)
class Limits:
    """Decides the most tokens of a micro-batch, padding included, on a scheme of a strategy.

    The first of these that exists is the limit:

    1. --max-tokens-per-micro-batch, rounded down to the scheme's token_quantum;
    2. the strategy's own ``max_tokens`` of the pool file (flags.checks refuses it with the flag);
    3. what fits in memory: `CostModel.max_tokens`.

    Measured limits then reduce it; nothing raises it.

    For ``cp8~``, 1 and 2 limit a wave: a group of c of its cp ranks holds c/8 of the limit, rounded
    down to the group's token_quantum, unless the strategy also has the group's scheme. A measured
    limit of a group thus reduces the wave and all its groups in proportion. By 3 each group has its
    own limit.

    Raises ConfigurationError for a flag below 1.
    """

    cost_model: CostModel
    flag: int | None = None
    """--max-tokens-per-micro-batch."""
    measured: tuple[tuple[Scheme, int], ...] = ()
    """Most tokens by measured memory, of schemes without ``~``."""
    row_quantum: int = 1
    """--row-quantum-tokens: see `row_rounding`."""

    def __post_init__(self) -> None:
        if self.flag is not None and self.flag < 1:
            raise ConfigurationError(
                f"limits: a micro-batch holds at least 1 token but the limit is {self.flag}; "
                f"give a positive limit or none"
            )
        if self.row_quantum < 1:
            raise ConfigurationError(
                f"--row-quantum-tokens is at least 1 but is {self.row_quantum}; give 1 to leave "
                f"rows as short as they are"
            )

    def row_tokens(self, strategy: Strategy, scheme: Scheme, lengths: Iterable[int]) -> int:
        """Tokens of the row in which sequences of these lengths run, padding included."""
        return (self.row_rounding(strategy, scheme) or scheme).row_tokens(lengths)

    def row_rounding(self, strategy: Strategy, scheme: Scheme) -> RowRounding | None:
        """How rows are rounded up beyond `Scheme.row_tokens`; None for not at all."""
        if self.row_quantum == 1:
            return None
        quantum_tokens = math.lcm(self.row_quantum, scheme.token_quantum)
        limit_tokens = scheme.rounded_down(self.max_tokens(strategy, scheme))
        return RowRounding(scheme, quantum_tokens, limit_tokens)

    def max_tokens(self, strategy: Strategy, scheme: Scheme) -> int:
        """The limit of a scheme of a strategy, or of a context group of one; 0 if nothing fits.

        Raises StrategyError as the cost model does.
        """
        set_limits = self._set_limits(strategy)
        if scheme in set_limits:
            return set_limits[scheme]
        if scheme not in strategy.schemes:
            for split, limit in set_limits.items():
                if split.splits_cp and split.of_context_group(scheme.cp) == scheme:
                    return scheme.rounded_down(limit * scheme.cp // split.cp)
        return self.of_scheme(scheme)

    def of_scheme(self, scheme: Scheme) -> int:
        """The limit of a scheme in strategies without ``max_tokens``; raises as `max_tokens`."""
        limit = self.by_flag(scheme)
        if limit is None:
            limit = self.cost_model.max_tokens(scheme)
        return min(limit, dict(self.measured).get(scheme.of_context_group(scheme.cp), limit))

    def by_flag(self, scheme: Scheme) -> int | None:
        """The limit of a scheme by --max-tokens-per-micro-batch; None without it."""
        return None if self.flag is None else scheme.rounded_down(self.flag)

    def holds(self, strategy: Strategy) -> bool:
        """Whether every replica of a strategy has room for a token."""
        return all(self.max_tokens(strategy, scheme) >= 1 for scheme in strategy.schemes)

    def reduced(self, measured: Iterable[tuple[Scheme, int]]) -> "Limits":
        """These limits with more measured ones; of several for a scheme the lowest counts."""
        merged = dict(self.measured)
        for scheme, limit in measured:
            merged[scheme] = min(limit, merged.get(scheme, limit))
        return replace(self, measured=tuple(merged.items()))

    def _set_limits(self, strategy: Strategy) -> dict[Scheme, int]:
        """Limits by the flag or the pool file, reduced by the measured ones of all groups."""
        limits = dict(strategy.token_limits)
        for scheme in strategy.schemes:
            if (by_flag := self.by_flag(scheme)) is not None:
                limits[scheme] = by_flag
        measured = dict(self.measured)
        for scheme, limit in limits.items():
            of_groups = [
                measured[group] * scheme.cp // group.cp
                for group in scheme.group_schemes
                if group in measured
            ]
            limits[scheme] = min(limit, *of_groups) if of_groups else limit
        return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTrial:
    """Memory that micro-batches of a scheme took on one rank, with all that are in flight."""

    num_tokens: int
    """Tokens of each, over all cp ranks, padding included."""
    idle_bytes: int
    """Memory in use before they ran, by this rank and others on its device."""
    peak_bytes: int
    """Peak while they ran."""
    capacity_bytes: int
    """Available on the device."""

    @property
    def bytes_per_token(self) -> float:
        """The slope of the line through the two measurements."""
        return max(0, self.peak_bytes - self.idle_bytes) / self.num_tokens

    def predicted_bytes(self, num_tokens: int) -> int:
        """Peak with micro-batches of num_tokens."""
        return round(self.idle_bytes + self.bytes_per_token * num_tokens)


def allowed_tokens(limit: int, scheme: Scheme, trials: Iterable[MemoryTrial]) -> int:
    """The limit, or fewer tokens if a rank's measurements allow only these.

    A multiple of the scheme's token_quantum if it is less; 0 if not even one quantum fits.
    """
    allowed = limit
    for trial in trials:
        if trial.predicted_bytes(allowed) <= trial.capacity_bytes:
            continue
        free = max(0, trial.capacity_bytes - trial.idle_bytes)
        fitting = int(free / trial.bytes_per_token) if trial.bytes_per_token else 0
        allowed = min(allowed, scheme.rounded_down(fitting))
    return allowed


def after_failure(num_tokens: int, scheme: Scheme) -> int:
    """The limit after a micro-batch of num_tokens ran out of memory; 0 if nothing is left."""
    return scheme.rounded_down(int(num_tokens * SHARE_AFTER_FAILURE))
