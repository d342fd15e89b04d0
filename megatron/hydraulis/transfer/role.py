"""A rank's role in a strategy: which units of the model it holds, and cut how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import Contribution, Unit


@dataclass(frozen=True)
class Role:
    """What one rank does in one replica; ranks of equal `Role` hold equal parameters."""

    tp: int
    tp_rank: int
    first_layer: int
    num_layers: int
    num_layers_of_model: int
    tied_embeddings: bool

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first stage."""
        return self.first_layer == 0

    @property
    def has_output(self) -> bool:
        """Whether this is the last stage."""
        return self.first_layer + self.num_layers == self.num_layers_of_model

    @cached_property
    def units(self) -> frozenset[Unit]:
        """The units held; the last stage of a tied model holds the embedding as well."""
        units = {Unit.layer(self.first_layer + i) for i in range(self.num_layers)}
        if self.has_embedding:
            units.add(Unit.first_stage())
        if self.has_embedding or (self.has_output and self.tied_embeddings):
            units.add(Unit.embedding())
        if self.has_output:
            units.add(Unit.output())
        return frozenset(units)

    def contributes(self, contribution: Contribution) -> bool:
        """Whether this TP rank sends gradients of that kind back to their owners."""
        return contribution is not Contribution.REPLICATED or self.tp_rank == 0


def role_of(
    strategy: Strategy, rank: int, *, num_layers: int, tied_embeddings: bool
) -> Role | None:
    """The role of ``rank`` in ``strategy``; None where the rank is idle."""
    replica = strategy.replica_of(rank)
    if replica is None:
        return None
    position = replica.position_of(rank)
    if position is None:
        return None
    layers = replica.scheme.layers_per_stage(num_layers)
    return Role(
        tp=replica.scheme.tp,
        tp_rank=position.tp,
        first_layer=sum(layers[: position.stage]),
        num_layers=layers[position.stage],
        num_layers_of_model=num_layers,
        tied_embeddings=tied_embeddings,
    )
