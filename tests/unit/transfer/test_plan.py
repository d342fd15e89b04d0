"""Transfer plans and roles, calculated by hand; properties are in tests/property."""

from dataclasses import replace

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import (
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)
from megatron.hydraulis.transfer.collective import link_elements
from megatron.hydraulis.transfer.plan import (
    Transfer,
    gather_plan,
    scatter_plan,
)
from megatron.hydraulis.transfer.ranges import Range, contributed_ranges, held_ranges
from megatron.hydraulis.transfer.role import Role, held_buckets
from tests.support.layouts import roles_of

WEIGHT = ParameterSpec("weight", (8, 1), Unit.layer(0), Contribution.SHARDED, tp_dim=0)
NORM = ParameterSpec("norm", (4,), Unit.layer(0), Contribution.REPLICATED, decays=False)
LAYOUT = CanonicalLayout.build([WEIGHT, NORM], num_atoms=4, num_ranks=3)
BUCKET = LAYOUT.buckets[0]


def test_gather_of_tp2_and_tp1() -> None:
    """12 elements owned by 4: ranks 0 and 1 hold half of the weight, rank 2 all, each the norm."""
    assert BUCKET.shard_borders == (0, 4, 8, 12)
    plan = gather_plan(LAYOUT, BUCKET, roles_of("tp2+tp1", 3))
    assert plan.transfers == (
        Transfer(0, 0, (Range(0, 4),)),
        Transfer(0, 2, (Range(0, 4),)),
        Transfer(1, 1, (Range(4, 8),)),
        Transfer(1, 2, (Range(4, 8),)),
        Transfer(2, 0, (Range(8, 12),)),
        Transfer(2, 1, (Range(8, 12),)),
        Transfer(2, 2, (Range(8, 12),)),
    )
    exchanged = [link_elements(plan, rank, ranks_per_node=None) for rank in range(3)]
    assert [each.received for each in exchanged] == [4, 4, 8]
    assert [each.sent for each in exchanged] == [4, 4, 8]


def test_a_replicated_gradient_comes_once_from_each_replica() -> None:
    plan = scatter_plan(LAYOUT, BUCKET, roles_of("tp2+tp1", 3))
    norm = [t.source for t in plan.received_by(2)]
    assert norm == [0, 2]
    assert [t.source for t in plan.received_by(1)] == [1, 2]


def test_an_idle_rank_gives_parameters_and_takes_gradients_but_not_the_other_way() -> None:
    roles = roles_of("tp1+2*idle", 3)
    assert roles[1] is roles[2] is None
    gather, scatter = gather_plan(LAYOUT, BUCKET, roles), scatter_plan(LAYOUT, BUCKET, roles)
    assert gather.received_by(1) == ()
    assert gather.sent_by(1) == (Transfer(1, 0, (Range(4, 8),)),)
    assert scatter.sent_by(1) == ()
    assert scatter.received_by(1) == (Transfer(0, 1, (Range(4, 8),)),)


def test_ranges_of_a_stage_without_the_unit_are_empty() -> None:
    other_stage = roles_of("pp2", 2, num_layers=2)[1]
    assert held_ranges(LAYOUT, BUCKET, other_stage) == ()
    assert held_ranges(LAYOUT, BUCKET, None) == ()


def test_contributed_ranges_are_merged_up_to_the_part_that_only_tp_rank_0_sends() -> None:
    first, second = roles_of("tp2", 2)
    assert held_ranges(LAYOUT, BUCKET, second) == (Range(4, 12),)
    assert contributed_ranges(LAYOUT, BUCKET, second) == (Range(4, 8),)
    assert contributed_ranges(LAYOUT, BUCKET, first) == (Range(0, 4), Range(8, 12))


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_empty_and_negative_ranges_are_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match=rf"\[{start}, {stop}\)"):
        Range(start, stop)


def test_roles_of_the_wrong_number_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="2 roles for 3 ranks"):
        gather_plan(LAYOUT, BUCKET, roles_of("tp2", 2))


def with_frozen(*units: Unit) -> set[Unit]:
    return {*units, *(unit.frozen for unit in units)}


class TestRole:
    def test_stages_of_an_uneven_pipeline_on_descending_ranks(self) -> None:
        roles = roles_of("pp2:1,3@2,1+tp1@0", 3, num_layers=4)
        assert roles[2] == Role(1, 0, 0, 1, 4, False)
        assert roles[1] == Role(1, 0, 1, 3, 4, False)
        assert roles[0] == Role(1, 0, 0, 4, 4, False)

    def test_units_of_the_stages(self) -> None:
        first, second = roles_of("pp2", 2, num_layers=2)
        embeds = {Unit.first_stage(), Unit.embedding()}
        assert first.units == with_frozen(*embeds, Unit.layer(0))
        assert second.units == with_frozen(Unit.layer(1), Unit.output())

    def test_the_last_stage_of_a_tied_model_holds_only_the_word_embedding(self) -> None:
        _, second, third = roles_of("pp3", 3, num_layers=3, tied=True)
        assert second.units == with_frozen(Unit.layer(1))
        assert third.units == with_frozen(Unit.embedding(), Unit.layer(2), Unit.output())

    def test_the_last_stage_that_predicts_contributes_to_the_embedding_and_is_not_a_first(
        self,
    ) -> None:
        first, second, third = roles_of("pp3", 3, num_layers=3, num_predictions=2)
        predictions = Unit.prediction(0), Unit.prediction(1)
        assert third.units == with_frozen(
            Unit.embedding(), Unit.layer(2), Unit.output(), *predictions
        )
        assert not {Unit.embedding(), *predictions} & second.units
        embedding = replace(WEIGHT, unit=Unit.embedding())
        assert first.contributes(embedding)
        assert third.contributes(embedding)
        # Scatters are posted early by a first stage alone, which receives nothing in the backward.
        assert [role.has_embedding for role in (first, second, third)] == [True, False, False]
        assert Unit.output() < predictions[0] < predictions[1]
        assert not predictions[0].is_layer

    def test_contributions(self) -> None:
        first, second = roles_of("tp2", 2)
        norm = ParameterSpec("q_norm", (4,), Unit.layer(0), Contribution.PARTIAL)
        assert all(first.contributes(each) for each in (WEIGHT, norm, NORM))
        assert second.contributes(WEIGHT)
        assert second.contributes(norm)
        assert not second.contributes(NORM)
        assert not first.contributes(replace(WEIGHT, unit=WEIGHT.unit.frozen))

    def test_frozen_buckets_are_held_by_ranks_that_keep_their_role(self) -> None:
        specs = [
            replace(WEIGHT, name=f"{i}", unit=Unit.layer(i).frozen if i < 3 else Unit.layer(i))
            for i in range(4)
        ]
        layout = CanonicalLayout.build(specs, num_atoms=2, num_ranks=4)
        mixed, flat, pipes = (
            roles_of(text, num_layers=4) for text in ("tp2+2*tp1", "4*tp1", "2*pp2")
        )
        assert held_buckets(layout, mixed, mixed) == {0, 1, 2}
        assert held_buckets(layout, None, mixed) == frozenset()
        assert held_buckets(layout, flat, mixed) == frozenset()
        deep, deeper = (
            roles_of(f"{text}+2*idle", num_layers=4) for text in ("pp2:1,3", "pp2:1,3@0,2")
        )
        assert held_buckets(layout, deep, deeper) == {0}
        assert held_buckets(layout, pipes, deep) == frozenset()

    def test_ep_ranks_hold_experts_whole_and_the_rest_by_tp(self) -> None:
        """Four ranks of a stage, cp by cp: ep 2 makes two groups, which hold the same experts."""
        roles = roles_of("tp2cp2ep2pp2", 8, num_layers=2, num_experts=6)
        assert [each.experts for each in roles] == [(0, 3), (3, 6)] * 4
        last = replace(WEIGHT, experts=(4, 5))
        assert [each.cut_of(last) for each in roles] == [None, (1, 0)] * 4
        assert [each.cut_of(WEIGHT) for each in roles] == [(2, 0), (2, 1)] * 4
        assert all(each.contributes(last) for each in roles)
        wide = roles_of("tp2cp2ep4", 4, num_experts=8)
        assert [each.experts for each in wide] == [(0, 2), (2, 4), (4, 6), (6, 8)]

    def test_a_parameter_of_experts_that_a_rank_holds_in_part_is_refused(self) -> None:
        first, _ = roles_of("cp2ep2", 2, num_experts=4)
        with pytest.raises(PlanError, match="holds experts 0 to 1 but it is of experts 1 to 2"):
            first.cut_of(replace(WEIGHT, experts=(1, 3)))

    def test_columns_share_weights_and_holders_of_the_same_experts_share_these(self) -> None:
        roles = roles_of("tp2cp3fs", 6)
        assert [(each.tp_rank, each.column) for each in roles] == [
            (tp, (column, 3)) for column in range(3) for tp in range(2)
        ]
        roles = roles_of("tp2cp4fsep4", 8, num_experts=4)
        assert [each.column for each in roles] == [(cp, 4) for cp in range(4) for _ in range(2)]
        assert [(each.experts, each.holder) for each in roles] == [
            ((expert, expert + 1), (holder, 2)) for holder in range(2) for expert in range(4)
        ]
        expert = replace(WEIGHT, experts=(0, 1))
        assert [roles[4].sharer_of(each) for each in (WEIGHT, expert)] == [(2, 4), (1, 2)]
        for each in roles_of("cp2fsep2", 2, num_experts=4):
            assert each.holder is None
            assert each.sharer_of(expert) == (0, 1), "a rank alone keeps all of its experts"

    def test_ranks_of_equal_place_in_replicas_of_one_scheme_have_equal_roles(self) -> None:
        roles = roles_of("2*tp2", 4)
        assert roles[0] == roles[2] != roles[1] == roles[3]
