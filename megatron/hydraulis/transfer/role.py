"""A rank's role in a strategy: which units of the model it holds and how they are cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import Contribution, Unit


@dataclass(frozen=True)
class Role:
    """The part of the model that a rank holds; ranks with equal roles hold equal parameters."""

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
        """The units held; the last stage of a tied model also holds the embedding."""
        units = {Unit.layer(self.first_layer + i) for i in range(self.num_layers)}
        if self.has_embedding:
            units.add(Unit.first_stage())
        if self.has_embedding or (self.has_output and self.tied_embeddings):
            units.add(Unit.embedding())
        if self.has_output:
            units.add(Unit.output())
        return frozenset(units)

    def contributes(self, contribution: Contribution) -> bool:
        """Whether this TP rank sends gradients of this kind to their owners."""
        return contribution is not Contribution.REPLICATED or self.tp_rank == 0


def roles_of(strategy: Strategy, num_layers: int, tied_embeddings: bool) -> list[Role | None]:
    """The role of every rank, None for idle ranks: shape (num_ranks,)."""
    roles: list[Role | None] = [None] * strategy.num_ranks
    for replica in strategy.replicas:
        scheme = replica.scheme
        layers = scheme.layers_per_stage(num_layers)
        for stage, cp, tp in itertools.product(*map(range, (scheme.pp, scheme.cp, scheme.tp))):
            roles[replica.rank_at(stage, cp, tp)] = Role(
                tp=scheme.tp,
                tp_rank=tp,
                first_layer=sum(layers[:stage]),
                num_layers=layers[stage],
                num_layers_of_model=num_layers,
                tied_embeddings=tied_embeddings,
            )
    return roles
