"""The three kinds of transfer, calculated by hand; properties are in tests/property."""

from typing import Any

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer import collective as collective_module
from megatron.hydraulis.transfer.amounts import LayoutAmounts, RankAmounts, StrategyAmounts
from megatron.hydraulis.transfer.canonical import (
    Bucket,
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)
from megatron.hydraulis.transfer.collective import (
    Collective,
    bucket_plans,
    collective_of,
    equal_shares,
    strategy_plans,
)
from megatron.hydraulis.transfer.plan import (
    RelayCopy,
    Segment,
    Transfer,
    arrival_segments,
    departure_segments,
    gather_plan,
    scatter_plan,
    two_step_plans,
)
from megatron.hydraulis.transfer.ranges import Range, buckets_with_equal_plans
from megatron.hydraulis.transfer.role import Role
from tests.support.layouts import roles_of

WEIGHT = ParameterSpec("weight", (16, 1), Unit.layer(0), Contribution.SHARDED, tp_dim=0)
NORM = ParameterSpec("norm", (1,), Unit.layer(0), Contribution.REPLICATED, decays=False)
LAYOUT = CanonicalLayout.build([WEIGHT], num_atoms=4, num_ranks=4)
BUCKET = LAYOUT.buckets[0]


def kind_of(
    roles: list[Role | None], ranks_per_node: int | None, layout: CanonicalLayout = LAYOUT
) -> Collective:
    return collective_of(StrategyAmounts(LayoutAmounts(layout, ranks_per_node), roles))


class TestKindOfAStrategy:
    @pytest.mark.parametrize(
        ("text", "ranks_per_node", "kind"),
        [
            ("4*tp1", None, Collective.ALL_GATHER),
            ("4*tp1", 2, Collective.ALL_GATHER),
            ("3*tp1+idle", None, Collective.ALL_TO_ALL),
            ("tp2+2*tp1", None, Collective.ALL_TO_ALL),
            ("tp2+2*tp1", 4, Collective.ALL_TO_ALL),
            ("tp2+2*tp1", 2, Collective.TWO_STEP),
            ("2*tp2", 2, Collective.ALL_TO_ALL),  # nothing is needed twice in a node
            ("2*tp2", 1, Collective.ALL_TO_ALL),  # nodes of one rank
            (
                "tp2@0,2+tp2@1,3",
                2,
                Collective.ALL_TO_ALL,
            ),  # both ranks of a node own what they need
            ("tp2@2,0+tp2@3,1", 2, Collective.TWO_STEP),  # both need what the other node owns
        ],
    )
    def test_kind(self, text: str, ranks_per_node: int | None, kind: Collective) -> None:
        assert kind_of(roles_of(text), ranks_per_node) is kind

    def test_context_parallel_ranks_need_the_same(self) -> None:
        roles = roles_of("cp4")
        assert kind_of(roles, 2) is Collective.ALL_GATHER

    def test_pipelines_do_not_hold_everything(self) -> None:
        layers = [
            ParameterSpec(f"{i}", (4, 1), Unit.layer(i), Contribution.SHARDED, tp_dim=0)
            for i in range(2)
        ]
        layout = CanonicalLayout.build(layers, num_atoms=1, num_ranks=4)
        roles = roles_of("2*pp2", num_layers=2)
        assert kind_of(roles, None, layout) is Collective.ALL_TO_ALL

    def test_norms_do_not_justify_a_second_step(self) -> None:
        """All TP ranks hold the norm: 1 element of 9 is needed twice in a node, and half of all
        elements lie in the other node."""
        layout = CanonicalLayout.build([WEIGHT, NORM], num_atoms=4, num_ranks=4)
        assert layout.buckets[0].shard_borders == (0, 4, 8, 12, 17)
        roles = roles_of("2*tp2")
        # Across: node 0 needs 8..17 of node 1, the norm twice; node 1 needs 0..8 once.
        assert StrategyAmounts(LayoutAmounts(layout, 2), roles).across == (18, 17)
        assert kind_of(roles, 2, layout) is Collective.ALL_TO_ALL

    def test_gather_and_scatter_count_what_crosses_nodes_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count, counted = StrategyAmounts.two_step, []

        def noted(amounts: StrategyAmounts, bucket: Bucket, contributed: bool) -> RankAmounts:
            counted.append(bucket.index)
            return count(amounts, bucket, contributed)

        monkeypatch.setattr(StrategyAmounts, "two_step", noted)
        amounts = StrategyAmounts(LayoutAmounts(LAYOUT, 2), roles_of("2*tp2"))
        assert collective_of(amounts) is collective_of(amounts, may_reduce=False)
        assert counted == [0]

    def test_bad_nodes_and_roles_are_refused(self) -> None:
        with pytest.raises(PlanError, match="3 ranks each but 4 ranks do not fill whole nodes"):
            kind_of(roles_of("2*tp2"), 3)
        with pytest.raises(PlanError, match="2 roles for 4 ranks"):
            kind_of(roles_of("tp2", 2), None)
        with pytest.raises(PlanError, match="ranks_per_node is None"):
            bucket_plans(Collective.TWO_STEP, LAYOUT, BUCKET, roles_of("2*tp2"))
        with pytest.raises(PlanError, match="plan an uneven all-to-all"):
            bucket_plans(Collective.ALL_GATHER, LAYOUT, BUCKET, roles_of("2*tp2"))


class TestEqualShares:
    def test_shares_of_one_size_need_no_copy(self) -> None:
        plan = equal_shares(BUCKET, roles_of("4*tp1"))
        assert plan.shards == ((0, 4), (4, 8), (8, 12), (12, 16))
        assert plan.segments == (Segment(0, 0, 16),)
        assert plan.num_buffer_elements == 16

    def test_shorter_shards_are_padded(self) -> None:
        layout = CanonicalLayout.build([WEIGHT], num_atoms=1, num_ranks=3)
        plan = equal_shares(layout.buckets[0], roles_of("3*tp1", 3))
        assert plan.shards == ((0, 5), (5, 10), (10, 16))
        assert (plan.share_elements, plan.num_buffer_elements) == (6, 18)
        assert plan.segments == (Segment(0, 0, 5), Segment(6, 5, 5), Segment(12, 10, 6))

    def test_permuted_owners_need_a_copy_though_shares_are_equal(self) -> None:
        layout = LAYOUT.with_owner_orders([(1, 0, 2, 3)])
        plan = equal_shares(layout.buckets[0], roles_of("4*tp1"))
        assert plan.segments == (Segment(4, 0, 4), Segment(0, 4, 4), Segment(8, 8, 8))

    def test_ranks_without_a_shard(self) -> None:
        layout = CanonicalLayout.build([NORM], num_atoms=1, num_ranks=4)
        plan = equal_shares(layout.buckets[0], roles_of("4*tp1"))
        assert plan.num_buffer_elements == 4
        assert sum(s.num_elements for s in plan.segments) == 1


class TestTwoSteps:
    """Ranks 0, 1 and 2, 3 are nodes; shards of 4. In ``tp2+2*tp1`` ranks 0 and 1 need half each,
    ranks 2 and 3 everything."""

    def test_elements_that_two_ranks_of_a_node_need_cross_once(self) -> None:
        plan, _ = two_step_plans(LAYOUT, BUCKET, roles_of("tp2+2*tp1"), ranks_per_node=2)
        assert plan.across.transfers == (
            Transfer(0, 0, (Range(0, 4),)),
            Transfer(0, 2, (Range(0, 4),)),
            Transfer(1, 1, (Range(4, 8),)),
            Transfer(1, 3, (Range(4, 8),)),
            Transfer(2, 0, (Range(8, 12),)),
            Transfer(2, 2, (Range(8, 12),)),
            Transfer(3, 1, (Range(12, 16),)),
            Transfer(3, 3, (Range(12, 16),)),
        )
        # Relay 2 has shards 0 and 2, relay 3 shards 1 and 3.
        assert plan.inside.received_by(2) == (
            Transfer(2, 2, (Range(0, 4), Range(8, 12))),
            Transfer(3, 2, (Range(4, 8), Range(12, 16))),
        )
        assert arrival_segments(plan.inside, 2) == (
            Segment(0, 0, 4),
            Segment(8, 4, 4),
            Segment(4, 8, 4),
            Segment(12, 12, 4),
        )
        # Both halves of what arrived across go to rank 2 (first 8 of the buffer) and to rank 3.
        assert plan.relay_copies(2) == (RelayCopy(0, 0, 8), RelayCopy(0, 8, 8))

    def test_a_relay_receives_for_others_what_it_does_not_need(self) -> None:
        plan, _ = two_step_plans(LAYOUT, BUCKET, roles_of("tp2+2*tp1"), ranks_per_node=2)
        # Rank 0 holds the first half, yet is the relay of rank 2, whose shard rank 1 needs.
        assert plan.inside.sent_by(0) == (
            Transfer(0, 0, (Range(0, 4),)),
            Transfer(0, 1, (Range(8, 12),)),
        )

    def test_the_scatter_adds_up_before_it_crosses(self) -> None:
        _, plan = two_step_plans(LAYOUT, BUCKET, roles_of("tp2+2*tp1"), ranks_per_node=2)
        assert not plan.across_first
        assert plan.steps == (plan.inside, plan.across)
        assert plan.inside.received_by(2) == (
            Transfer(2, 2, (Range(0, 4), Range(8, 12))),
            Transfer(3, 2, (Range(0, 4), Range(8, 12))),
        )
        assert plan.across.sent_by(2) == (
            Transfer(2, 0, (Range(0, 4),)),
            Transfer(2, 2, (Range(8, 12),)),
        )
        # The contributions of ranks 2 and 3 are added at the same place.
        assert plan.relay_copies(2) == (RelayCopy(0, 0, 8), RelayCopy(0, 8, 8))

    def test_neighbouring_shards_with_one_relay_are_one_range_inside(self) -> None:
        """Nodes of one rank: its relay has everything, cut again by owner across."""
        plan, _ = two_step_plans(LAYOUT, BUCKET, roles_of("3*tp1+idle"), ranks_per_node=1)
        assert plan.inside.transfers == tuple(Transfer(r, r, (Range(0, 16),)) for r in range(3))
        assert len(plan.across.received_by(0)) == 4
        assert plan.relay_copies(0) == (RelayCopy(0, 0, 16),)


class TestPermutedOwners:
    ORDER = (2, 3, 0, 1)
    LAYOUT = LAYOUT.with_owner_orders([ORDER])

    def test_a_rank_owns_the_share_that_names_it(self) -> None:
        bucket = self.LAYOUT.buckets[0]
        assert [bucket.shard_range(rank) for rank in range(4)] == [
            (8, 12),
            (12, 16),
            (0, 4),
            (4, 8),
        ]
        assert [bucket.owner_of(share) for share in range(4)] == [2, 3, 0, 1]

    def test_what_arrives_by_rank_is_not_in_canonical_order(self) -> None:
        roles = roles_of("tp1+3*idle")
        plan = gather_plan(self.LAYOUT, self.LAYOUT.buckets[0], roles)
        assert [t.ranges for t in plan.received_by(0)] == [
            (Range(8, 12),),
            (Range(12, 16),),
            (Range(0, 4),),
            (Range(4, 8),),
        ]
        assert arrival_segments(plan, 0) == (Segment(8, 0, 8), Segment(0, 8, 8))

    def test_arrivals_of_a_scatter_and_departures_of_a_gather_have_no_order(self) -> None:
        roles = roles_of("2*tp1+2*idle")
        with pytest.raises(PlanError, match="rank 0 receives element 8 twice"):
            arrival_segments(scatter_plan(self.LAYOUT, self.LAYOUT.buckets[0], roles), 0)
        with pytest.raises(PlanError, match="rank 2 sends element 0 twice"):
            departure_segments(gather_plan(self.LAYOUT, self.LAYOUT.buckets[0], roles), 2)

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
    def test_orders_that_are_no_permutation_are_refused(self, order: tuple[int, ...]) -> None:
        with pytest.raises(PlanError, match="bucket 0: every one of 4 ranks owns one share"):
            LAYOUT.with_owner_orders([order])

    def test_one_order_a_bucket(self) -> None:
        with pytest.raises(PlanError, match="0 owner orders for 1 buckets"):
            LAYOUT.with_owner_orders([])


class TestBucketsWithEqualPlans:
    def test_layers_of_a_stage_have_equal_plans_unless_an_end_or_an_owner_differs(self) -> None:
        layers = [
            ParameterSpec(f"{i}", (8, 1), Unit.layer(i), Contribution.SHARDED, tp_dim=0)
            for i in range(5)
        ]
        layout = CanonicalLayout.build(layers, num_atoms=2, num_ranks=4)
        roles = roles_of("2*pp2:2,3", num_layers=5)
        orders = [None, None, None, (1, 0, 2, 3), None]
        grouped = buckets_with_equal_plans(layout.with_owner_orders(orders), roles)
        assert [[bucket.index for bucket in group] for group in grouped] == [[0, 1], [2, 4], [3]]

    def test_layers_with_equal_gathers_may_have_different_scatters(self) -> None:
        kinds = (Contribution.PARTIAL, Contribution.REPLICATED, Contribution.PARTIAL)
        norms = [ParameterSpec(f"{i}", (8,), Unit.layer(i), kind) for i, kind in enumerate(kinds)]
        layout = CanonicalLayout.build(norms, num_atoms=2, num_ranks=4)
        grouped = buckets_with_equal_plans(layout, roles_of("2*tp2", num_layers=3))
        assert [[bucket.index for bucket in group] for group in grouped] == [[0, 2], [1]]

    def test_sixty_layers_need_few_plans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [
            ParameterSpec(f"{i}", (16, 1), Unit.layer(i), Contribution.SHARDED, tp_dim=0)
            for i in range(60)
        ]
        layout = CanonicalLayout.build(layers, num_atoms=2, num_ranks=4)
        roles = roles_of("tp2pp2", num_layers=60)
        planned: list[Bucket] = []

        def counted(layout: CanonicalLayout, bucket: Bucket, *args: Any, **named: Any) -> Any:
            planned.append(bucket)
            return gather_plan(layout, bucket, *args, **named)

        monkeypatch.setattr(collective_module, "gather_plan", counted)
        plans = strategy_plans(Collective.ALL_TO_ALL, layout, roles, rank=1)
        assert len(planned) == 2
        assert [gather.bucket for gather, _ in plans] == list(range(60))
