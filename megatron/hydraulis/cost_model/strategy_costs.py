"""A cost model as one strategy of a pool sees it."""

from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel, given_limit
from megatron.hydraulis.strategy import Scheme, Strategy

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
