"""Costs of the ways that no cost profile has, for the simulator."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.pipeline import StageCosts
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
