"""A cost model as one strategy of a pool sees it."""

from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Strategy

__all__ = ["StrategyCosts"]


@dataclass(frozen=True, slots=True)
class StrategyCosts:
    """Times and limits of the schemes of one strategy: the strategy's own limits come first."""

    cost_model: CostModel
    strategy: Strategy

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The time of a micro-batch on the slowest stage of a scheme; as the cost model says."""
        return self.cost_model.coefficients(scheme)

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch: what the strategy says, else what the cost model says."""
        limit = self.strategy.token_limit(scheme)
        return self.cost_model.max_tokens(scheme) if limit is None else limit

    @property
    def overhead_ms(self) -> float:
        """What an iteration with this strategy takes beside its makespan."""
        return self.cost_model.overhead_ms(self.strategy)
