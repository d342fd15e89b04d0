"""Bytes of regrouping and owners, by hand; plans of one of 1,024 ranks stay small."""

import pytest

from benchmarks.regroup_bytes import zero1_degree
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer import plan as plan_module
from megatron.hydraulis.transfer import role
from megatron.hydraulis.transfer.amounts import LinkElements
from megatron.hydraulis.transfer.canonical import (
    Bucket,
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)
from megatron.hydraulis.transfer.collective import (
    RegroupBytes,
    equal_shares,
    link_elements,
    regroup_bytes,
)
from megatron.hydraulis.transfer.plan import (
    gather_plan,
    scatter_plan,
    two_step_plans,
)
from megatron.hydraulis.transfer.ranges import best_owner_orders
from megatron.hydraulis.transfer.role import Role
from tests.support.layouts import roles_of

WEIGHT = ParameterSpec("weight", (16, 1), Unit.layer(0), Contribution.SHARDED, tp_dim=0)
LAYOUT = CanonicalLayout.build([WEIGHT], num_atoms=4, num_ranks=4)
BUCKET = LAYOUT.buckets[0]


class TestBytes:
    def test_by_link(self) -> None:
        """Rank 2 needs all 16: it owns 4, 4 are of rank 3 in its node, 8 across; its own 4 go to
        rank 3 and to rank 1, whose half they are in."""
        roles = roles_of("tp2+2*tp1")
        plan = gather_plan(LAYOUT, BUCKET, roles, rank=2)
        assert link_elements(plan, 2, ranks_per_node=2) == LinkElements(4, 8, 4, 4)
        assert link_elements(plan, 2, ranks_per_node=None) == LinkElements(12, 0, 8, 0)

    def test_both_steps_count(self) -> None:
        """Rank 2 gets shard 0 across (4), and 8 of rank 3 inside; gives 8 to rank 3, its shard to
        rank 0, the relay of node 0."""
        plan, _ = two_step_plans(LAYOUT, BUCKET, roles_of("tp2+2*tp1"), ranks_per_node=2)
        assert link_elements(plan, 2, ranks_per_node=2) == LinkElements(8, 4, 8, 4)

    @pytest.mark.parametrize(
        ("per_node", "inside", "across"), [(None, 12, 0), (4, 12, 0), (2, 8, 4)]
    )
    def test_an_all_gather_enters_each_node_once(
        self, per_node: int | None, inside: int, across: int
    ) -> None:
        plan = equal_shares(BUCKET, roles_of("4*tp1"))
        expected = LinkElements(inside, across, inside, across)
        assert link_elements(plan, 1, ranks_per_node=per_node) == expected

    def test_parameters_and_gradients_have_their_own_sizes(self) -> None:
        roles = roles_of("tp2+2*tp1")
        found = regroup_bytes(
            [gather_plan(LAYOUT, BUCKET, roles)],
            [scatter_plan(LAYOUT, BUCKET, roles)],
            2,
            ranks_per_node=2,
            parameter_bytes=2,
            gradient_bytes=4,
        )
        assert found == RegroupBytes(8 + 16, 8 + 8, 16 + 16, 16 + 32)
        assert (found.received_bytes, found.sent_bytes) == (24 + 32, 16 + 48)


class TestZero1:
    @pytest.mark.parametrize(
        ("text", "degree"), [("4*tp1", 4), ("2*tp2", 2), ("cp4", 4), ("2*pp2", 2), ("tp2pp2", 1)]
    )
    def test_degree(self, text: str, degree: int) -> None:
        assert zero1_degree(Strategy.parse(text, 4)) == degree

    @pytest.mark.parametrize("text", ["tp2+2*tp1", "2*tp1+2*idle", "pp2:1,3+pp2:3,1", "pp2+2*tp1"])
    def test_only_homogeneous_strategies_compare(self, text: str) -> None:
        assert zero1_degree(Strategy.parse(text, 4)) is None


class TestOwners:
    def test_owners_that_hold_their_shares_receive_as_much_as_under_zero1(self) -> None:
        """Two replicas of two halves: ranks 0 and 2 hold 0..8, ranks 1 and 3 hold 8..16. By number
        rank 1 owns 4..8 and rank 2 owns 8..12, which neither holds; exchanged, both do."""
        roles = roles_of("2*tp2")
        assert _received(LAYOUT, roles) == [4, 8, 8, 4]
        orders = best_owner_orders(LAYOUT, roles)
        assert orders == ((0, 2, 1, 3),)
        held = 8
        assert _received(LAYOUT.with_owner_orders(orders), roles) == [held * (2 - 1) // 2] * 4

    def test_ranks_of_another_stage_get_the_rest(self) -> None:
        layers = [
            ParameterSpec(f"{i}", (16, 1), Unit.layer(i), Contribution.SHARDED, tp_dim=0)
            for i in range(2)
        ]
        layout = CanonicalLayout.build(layers, num_atoms=4, num_ranks=4)
        roles = roles_of("tp2pp2", num_layers=2)
        orders = best_owner_orders(layout, roles)
        permuted = layout.with_owner_orders(orders)
        for bucket, stage in zip(permuted.buckets, ((0, 1), (2, 3)), strict=True):
            first, second = stage
            assert bucket.shard_range(first)[1] <= 8 <= bucket.shard_range(second)[0]

    def test_without_a_gain_rank_r_keeps_share_r(self) -> None:
        assert best_owner_orders(LAYOUT, roles_of("4*tp1")) == (None,)
        assert best_owner_orders(LAYOUT, roles_of("tp4")) == (None,)


def _received(layout: CanonicalLayout, roles: list[Role | None]) -> list[int]:
    """Elements that each rank receives from others in a gather."""
    plan = gather_plan(layout, layout.buckets[0], roles)
    ranks = range(layout.num_ranks)
    return [link_elements(plan, rank, ranks_per_node=None).received for rank in ranks]


NUM_RANKS = 1024
RANKS_PER_NODE = 8
NUM_NODES = NUM_RANKS // RANKS_PER_NODE


@pytest.fixture(scope="module")
def job() -> tuple[CanonicalLayout, Bucket, list[Role | None]]:
    """A layer and a strategy of two schemes for 1,024 ranks."""
    unit = Unit.layer(0)
    parameters = [
        ParameterSpec("qkv", (3072, 8), unit, Contribution.SHARDED, tp_dim=0),
        ParameterSpec("proj", (64, 1024), unit, Contribution.SHARDED, tp_dim=1),
        ParameterSpec("fc1", (4096, 8), unit, Contribution.SHARDED, tp_dim=0, parts=(2048,) * 2),
        ParameterSpec("norm", (64,), unit, Contribution.PARTIAL),
    ]
    layout = CanonicalLayout.build(parameters, num_atoms=16, num_ranks=NUM_RANKS)
    strategy = Strategy.parse("16*tp16+192*tp4", NUM_RANKS, ranks_per_node=RANKS_PER_NODE)
    roles = role.roles_of(strategy, 1, False)
    return layout, layout.buckets[0], roles


class TestPlansOfOneOf1024Ranks:
    """Objects and calls are counted, not seconds: they may grow with N, not with N times N."""

    @pytest.mark.parametrize("rank", [0, 17, 1023])
    def test_one_step(
        self,
        job: tuple[CanonicalLayout, Bucket, list[Role | None]],
        rank: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        layout, bucket, roles = job
        calls = _count_calls(monkeypatch, plan_module, "clip")
        for make in (gather_plan, scatter_plan):
            found = make(layout, bucket, roles, rank=rank)
            assert len(found.transfers) <= 2 * NUM_RANKS
            assert sum(len(t.ranges) for t in found.transfers) <= 4 * NUM_RANKS
        assert len(calls) <= 2 * len(set(roles))

    @pytest.mark.parametrize("rank", [0, 17, 1023])
    def test_two_steps(
        self,
        job: tuple[CanonicalLayout, Bucket, list[Role | None]],
        rank: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        layout, bucket, roles = job
        calls = [_count_calls(monkeypatch, plan_module, name) for name in ("clip", "intersection")]
        for found in two_step_plans(
            layout, bucket, roles, ranks_per_node=RANKS_PER_NODE, rank=rank
        ):
            assert len(found.across.transfers) <= 2 * NUM_NODES
            assert len(found.inside.transfers) <= 2 * RANKS_PER_NODE
            ranges = [r for step in found.steps for t in step.transfers for r in t.ranges]
            assert len(ranges) <= 4 * NUM_RANKS
            assert len(found.relay_copies(rank)) <= 4 * NUM_RANKS
        num_calls = sum(len(of_one) for of_one in calls)
        assert num_calls <= 2 * 2 * (NUM_NODES + RANKS_PER_NODE)


def _count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[None]:
    """A list that grows by one per call."""
    calls: list[None] = []
    original = getattr(module, name)

    def counted(*args: object) -> object:
        calls.append(None)
        return original(*args)

    monkeypatch.setattr(module, name, counted)
    return calls
