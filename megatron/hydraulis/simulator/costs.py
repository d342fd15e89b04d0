"""Times of a micro-batch on each stage, for the simulator."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy


@dataclass(frozen=True)
class StageCosts:
    """Coefficients of every stage of a scheme.

    A cost model has the time of the slowest stage. If the shape of the model is known, the other
    stages take a share of it: of a and c by their layers, of b by the entries of their matrices,
    including the output layer. The embedding is a look-up and costs nothing. Without the shape all
    stages take the same time, which is what the planner assumes.
    """

    cost_model: CostModel
    shape: ModelShape | None = None
    """None if all stages are to take the same time."""
    _known: dict[Scheme, tuple[Coefficients, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def coefficients(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        """Shape (pp,), by stage; raises StrategyError as cost model and scheme do."""
        if scheme not in self._known:
            self._known[scheme] = self._of(scheme)
        return self._known[scheme]

    def output_share(self, scheme: Scheme, stage: int) -> float:
        """Share of the output layer in a stage's matrix products, from 0 to 1."""
        if self.shape is None or stage < scheme.pp - 1:
            return 0.0
        return self.shape.num_embedding_parameters / _stage_entries(self.shape, scheme)[stage]

    def _of(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        slowest = self.cost_model.coefficients(scheme)
        if self.shape is None:
            return (slowest,) * scheme.pp
        layers = scheme.layers_per_stage(self.shape.num_layers)
        entries = _stage_entries(self.shape, scheme)
        most_layers, most_entries = max(layers), max(entries)
        return tuple(
            replace(
                slowest,
                a_ms_per_token2=slowest.a_ms_per_token2 * num_layers / most_layers,
                b_ms_per_token=slowest.b_ms_per_token * num_entries / most_entries,
                c_ms=slowest.c_ms * num_layers / most_layers,
            )
            for num_layers, num_entries in zip(layers, entries, strict=True)
        )


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


def _stage_entries(shape: ModelShape, scheme: Scheme) -> list[int]:
    """Number of entries of each stage's matrices: shape (pp,)."""
    layers = scheme.layers_per_stage(shape.num_layers)
    entries = [num_layers * shape.num_matrix_parameters_per_layer for num_layers in layers]
    entries[-1] += shape.num_embedding_parameters
    return entries
