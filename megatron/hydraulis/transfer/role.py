"""A rank's role in a strategy: which units of the model it holds and how they are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import (
    ALIGNMENT_ELEMENTS,
    UNIT_ALIGNMENT_ELEMENTS,
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)

NUM_GRADIENT_SLOTS = 2
"""Layers whose shared gradients are whole at a time: one is scattered while another computes."""


@dataclass(frozen=True)
class Role:
    """The part of the model that a rank holds; ranks with equal roles hold equal parameters."""

    tp: int
    tp_rank: int
    first_layer: int
    num_layers: int
    num_layers_of_model: int
    tied_embeddings: bool
    experts: tuple[int, int] | None = None
    """Experts [start, stop) of every layer, which the rank holds whole; None if tp cuts all."""
    column: tuple[int, int] | None = None
    """(number of this cp rank, number of them) if each keeps a share of the weights; else None."""
    holder: tuple[int, int] | None = None
    """(number of this rank, number of them) among those that keep a share of the same experts."""
    num_predictions: int = 0
    """Layers of multi-token prediction of the model, all on its last stage."""

    @property
    def has_embedding(self) -> bool:
        """True if this is the first stage."""
        return self.first_layer == 0

    @property
    def has_output(self) -> bool:
        """True if this is the last stage."""
        return self.first_layer + self.num_layers == self.num_layers_of_model

    @cached_property
    def units(self) -> frozenset[Unit]:
        """The units held, trained and frozen; the last stage also holds the embedding of a model
        that is tied, or predicts several tokens."""
        units = {Unit.layer(self.first_layer + i) for i in range(self.num_layers)}
        if self.has_embedding:
            units.add(Unit.first_stage())
        uses_embedding = self.tied_embeddings or self.num_predictions > 0
        if self.has_embedding or (self.has_output and uses_embedding):
            units.add(Unit.embedding())
        if self.has_output:
            units.add(Unit.output())
            units |= {Unit.prediction(i) for i in range(self.num_predictions)}
        return frozenset(units | {unit.frozen for unit in units})

    @property
    def cut(self) -> tuple[object, ...]:
        """Properties that decide, with its units, which ranges of a bucket it holds."""
        return self.tp, self.tp_rank, self.experts, self.column, self.holder

    def cut_of(self, parameter: ParameterSpec) -> tuple[int, int] | None:
        """The tp degree and TP rank that this rank's part of a parameter of its units has: (1, 0)
        for one of an expert that it holds whole. None if it holds nothing of it.

        Raises:
            PlanError: the parameter is of several experts, of which the rank holds some.
        """
        if self.experts is None or parameter.experts is None:
            return self.tp, self.tp_rank
        (start, stop), (first, last) = parameter.experts, self.experts
        if stop <= first or last <= start:
            return None
        if start < first or last < stop:
            raise PlanError(
                f"parameter '{parameter.name}': a rank holds experts {first} to {last - 1} but it "
                f"is of experts {start} to {stop - 1}; group experts by a multiple of every ep"
            )
        return 1, 0

    def sharer_of(self, parameter: ParameterSpec) -> tuple[int, int]:
        """(number of this rank, number of them) among those that keep a share of its part of a
        parameter; (0, 1) where it keeps all of that."""
        is_whole_expert = self.experts is not None and parameter.experts is not None
        return (self.holder if is_whole_expert else self.column) or (0, 1)

    def contributes(self, parameter: ParameterSpec) -> bool:
        """True if this rank sends its gradient of a parameter to the owners.

        Every rank with a whole expert does, as each has seen other tokens. Frozen parameters have
        no gradient.
        """
        sends = parameter.contribution is not Contribution.REPLICATED or self.tp_rank == 0
        return sends and not parameter.is_frozen


@dataclass(frozen=True)
class ParameterRun:
    """Parameters of a unit in one flat run, of which each of some ranks keeps an equal share."""

    offsets: dict[int, int]
    """First element of each parameter, by index into ``CanonicalLayout.parameters``."""
    share_elements: int
    """Elements that each rank keeps: all of the run if one does."""
    sharer: tuple[int, int]
    """(number of this rank, number of them)."""
    is_frozen: bool = False

    @property
    def is_shared(self) -> bool:
        """True if several ranks keep shares."""
        return self.sharer[1] > 1

    @property
    def num_elements(self) -> int:
        """Elements of the run, with the padding behind the last parameter."""
        return self.share_elements * self.sharer[1]

    @property
    def share_start(self) -> int:
        """First element of the run that is kept."""
        return self.share_elements * self.sharer[0]


def runs_of(layout: CanonicalLayout, role: Role, unit: Unit) -> list[ParameterRun]:
    """The runs of a unit that the role holds, in canonical order: one for each group of ranks that
    share parameters, which are others for whole experts."""
    offsets: dict[tuple[int, int], dict[int, int]] = {}
    ends: dict[tuple[int, int], int] = {}
    for index in layout.parameters_of[unit]:
        parameter = layout.parameters[index]
        cut, sharer = role.cut_of(parameter), role.sharer_of(parameter)
        if cut is not None:
            start = aligned(ends.get(sharer, 0), ALIGNMENT_ELEMENTS)
            offsets.setdefault(sharer, {})[index] = start
            ends[sharer] = start + math.prod(parameter.local_shape(cut[0]))
    runs = []
    for sharer, end in ends.items():
        share = end
        if sharer[1] > 1:
            share = aligned(-(-end // sharer[1]), UNIT_ALIGNMENT_ELEMENTS)
        runs.append(ParameterRun(offsets[sharer], share, sharer, unit.is_frozen))
    return runs


def held_buckets(
    layout: CanonicalLayout,
    before: Sequence[Role | None] | None,
    now: Sequence[Role | None],
) -> frozenset[int]:
    """Indices of the frozen buckets that no rank needs again, as all of their holders hold them.

    Args:
        before: the role of every rank for which it holds its frozen parameters; None if they may
            be lost. A rank holds those of one role at a time.
        now: the role of every rank in the next strategy.
    """
    if before is None:
        return frozenset()
    others = {role for role, last in zip(now, before, strict=True) if role not in (None, last)}
    needed = {unit for role in others if role is not None for unit in role.units}
    return frozenset(
        bucket.index
        for bucket in layout.buckets
        if bucket.unit.is_frozen and bucket.unit not in needed
    )


def aligned(num_elements: int, step: int) -> int:
    """The number rounded up to a multiple of the step."""
    return -(-num_elements // step) * step


def roles_of(
    strategy: Strategy,
    num_layers: int,
    tied_embeddings: bool,
    num_experts: int = 0,
    num_predictions: int = 0,
) -> list[Role | None]:
    """The role of every rank, None for idle ranks: shape (num_ranks,).

    Args:
        num_experts: of a layer.
        num_predictions: layers of multi-token prediction.

    Raises:
        StrategyError: a scheme cannot divide the layers or the experts.
    """
    roles: list[Role | None] = [None] * strategy.num_ranks
    for replica in strategy.replicas:
        scheme = replica.scheme
        layers = scheme.layers_per_stage(num_layers)
        in_each = scheme.experts_per_rank(num_experts)
        for stage, cp, tp in itertools.product(*map(range, (scheme.pp, scheme.cp, scheme.tp))):
            rank = replica.rank_at(stage, cp, tp)
            holder, place = divmod(cp * scheme.tp + tp, scheme.ep)
            shares_experts = scheme.ep > 1 and scheme.num_holders > 1
            first_expert = in_each * place
            roles[rank] = Role(
                tp=scheme.tp,
                tp_rank=tp,
                first_layer=sum(layers[:stage]),
                num_layers=layers[stage],
                num_layers_of_model=num_layers,
                tied_embeddings=tied_embeddings,
                experts=(first_expert, first_expert + in_each) if scheme.ep > 1 else None,
                column=(cp, scheme.cp) if scheme.shares_weights else None,
                holder=(holder, scheme.num_holders) if shares_experts else None,
                num_predictions=num_predictions,
            )
    return roles
