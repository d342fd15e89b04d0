"""What a micro-batch costs on each stage of a replica.

A cost model tells the time of the *slowest* stage. Where the shape of the model is known, other
stages take their share of it: a and c by their layers, b by the entries of their matrices, the
output layer's included. The embedding is looked up and costs nothing. Without the shape all stages
take the same, which is what the planner assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.scheme import Scheme

__all__ = ["StageCosts"]


@dataclass(frozen=True)
class StageCosts:
    """Coefficients of every stage of a scheme."""

    cost_model: CostModel
    shape: ModelShape | None = None
    """None where all stages are to be alike."""
    _known: dict[Scheme, tuple[Coefficients, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def coefficients(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        """Shape (pp,), by stage; raises StrategyError as cost model and scheme do."""
        if scheme not in self._known:
            self._known[scheme] = self._of(scheme)
        return self._known[scheme]

    def output_share(self, scheme: Scheme, stage: int) -> float:
        """Share of a stage's matrix products that is the output layer's, from 0 to 1."""
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
            Coefficients(
                a_ms_per_token2=slowest.a_ms_per_token2 * num_layers / most_layers,
                b_ms_per_token=slowest.b_ms_per_token * num_entries / most_entries,
                c_ms=slowest.c_ms * num_layers / most_layers,
            )
            for num_layers, num_entries in zip(layers, entries, strict=True)
        )


def _stage_entries(shape: ModelShape, scheme: Scheme) -> list[int]:
    """Entries of the matrices that each stage multiplies with: shape (pp,)."""
    layers = scheme.layers_per_stage(shape.num_layers)
    entries = [num_layers * shape.num_matrix_parameters_per_layer for num_layers in layers]
    entries[-1] += shape.num_embedding_parameters
    return entries
