"""The interface of cost models, measured or analytic, for the planner."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.strategy import Scheme, Strategy

MOST_MS = 1e100
"""Upper limit of times; sums of squared lengths times it are still finite."""

FORWARD_SHARE = 1.0 / 3.0
"""Usual share of the forward in a micro-batch's time: the backward of a matrix product is two
products of its size, for the gradients of input and weight (arXiv 2104.04473, appendix)."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Time of one micro-batch on one pipeline stage, forward and backward together.

    ``t = a·Σ s_i² + b·Σ s_i + c`` over the lengths s_i of the sequences in it, in tokens: the
    time model of Hydraulis (arXiv 2412.07894). A sliding window leaves less of s_i², see
    `AttentionWindow.squared`.

    What runs at the same time does not add up: there may be several such **forms**, and the time is
    the largest of them. A ring of keys and values has three, as attention may hide its exchange in
    forward and backward, in the backward only, or in neither. All have one share of the forward: a
    pipeline's bounds need it, and shares of different forms differ little. The host issues kernels
    ahead of the device, so its time is not a form: it binds all micro-batches of a replica
    together, see host_ms.

    Raises ConfigurationError when a coefficient is negative, not finite, or not below MOST_MS, for
    a share of the forward that is not between 0 and 1, and when other forms have another window or
    share, or host time or forms themselves.
    """

    a_ms_per_token2: float
    """Attention: grows with the square of a sequence's length."""
    b_ms_per_token: float
    """Matrix products and communication: grow with the tokens."""
    c_ms: float
    """Constant cost of a micro-batch."""
    window: AttentionWindow | None = None
    """Window of the model's layers; the same for all schemes of a job."""
    forward_share: float = FORWARD_SHARE
    """Share of the forward in the time."""
    others: tuple["Coefficients", ...] = ()
    """The other forms."""
    host_ms: float = 0.0
    """Time of the host to issue forward and backward of a micro-batch: a replica of n micro-batches
    takes at least n times this."""

    def __post_init__(self) -> None:
        for value in (self.a_ms_per_token2, self.b_ms_per_token, self.c_ms, self.host_ms):
            if not 0.0 <= value < MOST_MS:
                raise ConfigurationError(
                    f"coefficients must be at least 0 and below {MOST_MS} but are "
                    f"a = {self.a_ms_per_token2} ms/token², b = {self.b_ms_per_token} ms/token, "
                    f"c = {self.c_ms} ms, host {self.host_ms} ms; correct the cost profile"
                )
        for form in self.others:
            if form != replace(
                self,
                a_ms_per_token2=form.a_ms_per_token2,
                b_ms_per_token=form.b_ms_per_token,
                c_ms=form.c_ms,
                others=(),
                host_ms=0.0,
            ):
                raise ConfigurationError(
                    f"forms of a cost model differ in a, b and c only but there is {form} besides "
                    f"a share of the forward of {self.forward_share}; correct the cost profile"
                )
        if not 0.0 < self.forward_share < 1.0:
            raise ConfigurationError(
                f"coefficients of a cost model: forward_share is between 0 and 1 but is "
                f"{self.forward_share}; correct the cost profile"
            )

    def squared(self, lengths: Any) -> Any:
        """What of s² attention computes, in tokens²; lengths: a number or an array, in tokens."""
        return lengths * lengths if self.window is None else self.window.squared(lengths)

    def sequence_time_ms(self, length: Any) -> Any:
        """What one sequence adds to its micro-batch: ``a·s² + b·s``; length: as in `squared`."""
        if self.window is None:
            return (self.a_ms_per_token2 * length + self.b_ms_per_token) * length
        return self.token_time_ms(length) * length

    def token_time_ms(self, length: Any) -> Any:
        """`sequence_time_ms` per token, which is least for the shortest sequence."""
        if self.window is None:
            return self.a_ms_per_token2 * length + self.b_ms_per_token
        return self.a_ms_per_token2 * (self.window.squared(length) / length) + self.b_ms_per_token

    @property
    def forms(self) -> tuple["Coefficients", ...]:
        """Every form as the only one, without the host."""
        return (replace(self, others=(), host_ms=0.0), *self.others)

    def scaled(self, *, a: float = 1.0, b: float = 1.0, c: float = 1.0) -> "Coefficients":
        """The coefficients of every form times these factors; c also scales the host's time."""
        return replace(
            self,
            a_ms_per_token2=a * self.a_ms_per_token2,
            b_ms_per_token=b * self.b_ms_per_token,
            c_ms=c * self.c_ms,
            others=tuple(form.scaled(a=a, b=b, c=c) for form in self.others),
            host_ms=c * self.host_ms,
        )

    def time_ms(self, lengths: Iterable[int], row_tokens: int | None = None) -> float:
        """Time of a micro-batch of sequences of these lengths, on one stage.

        row_tokens: of the row, which replace Σ s_i where padding is to count. Lengths are summed as
        integers, so the order of the sequences does not matter.
        """
        window, num_tokens, sum_of_squares = self.window, 0, 0
        for length in lengths:
            num_tokens += length
            sum_of_squares += length * length if window is None else window.squared(length)
        if row_tokens is not None:
            num_tokens = row_tokens
        time_ms: float = self.time_of_sums_ms(sum_of_squares, num_tokens)
        return time_ms

    def time_of_sums_ms(self, squares: Any, num_tokens: Any) -> Any:
        """Times of micro-batches: the largest of all forms.

        squares, num_tokens: Σ of `squared` lengths and Σ s_i, numbers or arrays of one shape.
        """
        time_ms = self.a_ms_per_token2 * squares + self.b_ms_per_token * num_tokens + self.c_ms
        if not self.others:
            return time_ms
        largest = max if isinstance(time_ms, float) else np.maximum
        for form in self.others:
            other_ms = form.a_ms_per_token2 * squares + form.b_ms_per_token * num_tokens + form.c_ms
            time_ms = largest(time_ms, other_ms)
        return time_ms

    def least_time_ms(self, squares: Any, num_tokens: Any, num_micro_batches: Any) -> Any:
        """Lower bound of the time of micro-batches together: what the largest form takes of all.

        squares, num_tokens: of all sequences, as in `time_of_sums_ms`; num_micro_batches likewise.
        """
        time_ms = 0.0
        for form in (self, *self.others):
            work_ms = form.a_ms_per_token2 * squares + form.b_ms_per_token * num_tokens
            time_ms = np.maximum(time_ms, work_ms + form.c_ms * num_micro_batches)
        return time_ms


class CostModel(Protocol):
    """Time and memory of a scheme, for the model, devices and strategies of one job."""

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The time of a micro-batch on the slowest stage of a scheme."""
        ...

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch that fit in memory, over all cp ranks; 0 if not even the
        weights fit. `limits.Limits` decides which limit holds."""
        ...

    def overhead_ms(self, strategy: Strategy) -> float:
        """Time of regrouping and optimizer that an iteration takes in addition to its makespan,
        without what overlaps with the replicas' work; 0.0 if unknown."""
        ...
