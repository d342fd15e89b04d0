"""What the planner asks of a cost model, measured or analytic."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Scheme, Strategy

__all__ = ["MOST_MS", "Coefficients", "CostModel", "given_limit"]

MOST_MS = 1e100
"""Nothing takes so long, and sums of squared lengths times it are still finite."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Time of one micro-batch on one pipeline stage, forward and backward together.

    ``t = a·Σ s_i² + b·Σ s_i + c`` over the lengths s_i of the sequences in it, in tokens: the
    time model of Hydraulis (arXiv 2412.07894).

    Raises ConfigurationError when a coefficient is negative, not finite, or not below MOST_MS.
    """

    a_ms_per_token2: float
    """Attention: grows with the square of a sequence's length."""
    b_ms_per_token: float
    """Matrix products and communication: grow with the tokens."""
    c_ms: float
    """What every micro-batch costs, however small."""

    def __post_init__(self) -> None:
        for value in (self.a_ms_per_token2, self.b_ms_per_token, self.c_ms):
            if not 0.0 <= value < MOST_MS:
                raise ConfigurationError(
                    f"coefficients of a cost model must be finite and not negative but are "
                    f"a = {self.a_ms_per_token2} ms/token², b = {self.b_ms_per_token} ms/token, "
                    f"c = {self.c_ms} ms; correct the cost profile"
                )

    def sequence_time_ms(self, length: int) -> float:
        """What one sequence adds to its micro-batch: ``a·s² + b·s``."""
        return (self.a_ms_per_token2 * length + self.b_ms_per_token) * length

    def time_ms(self, lengths: Iterable[int]) -> float:
        """Time of a micro-batch of sequences of these lengths, on one stage.

        The sums are taken over integers first, so the order of the sequences does not matter.
        """
        num_tokens = sum_of_squares = 0
        for length in lengths:
            num_tokens += length
            sum_of_squares += length * length
        return self.a_ms_per_token2 * sum_of_squares + self.b_ms_per_token * num_tokens + self.c_ms


class CostModel(Protocol):
    """Time and memory of a scheme, for the model, devices and strategies of one job."""

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The time of a micro-batch on the slowest stage of a scheme."""
        ...

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens one micro-batch may hold, over all cp ranks; 0 where not even the weights
        fit. A hard limit, unless a strategy has its own: see StrategyCosts."""
        ...

    def overhead_ms(self, strategy: Strategy) -> float:
        """What of regrouping and optimizer an iteration with a strategy takes beside its makespan.

        Only what does not overlap with the replicas' work; 0.0 where nothing is known of it.
        """
        ...


def given_limit(max_tokens: int, scheme: Scheme) -> int:
    """A limit of tokens per micro-batch that somebody gave, as it holds on a scheme.

    It includes the padding that the scheme's tp and cp make necessary, so it is rounded down to
    their multiple.
    """
    return max_tokens - max_tokens % scheme.token_quantum
