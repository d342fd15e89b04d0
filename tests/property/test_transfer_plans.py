"""Transfer plans move every element to its place, for any shapes, T, ranks and strategy.

An oracle in `tests.support.layouts` numbers all elements and cuts parameters with numpy; nothing
here, nor what it tests, imports torch.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given

from megatron.hydraulis.transfer import role as transfer_role
from megatron.hydraulis.transfer.collective import link_elements
from megatron.hydraulis.transfer.plan import (
    TransferPlan,
    gather_plan,
    scatter_plan,
)
from megatron.hydraulis.transfer.ranges import (
    contributed_ranges,
    held_ranges,
    num_elements,
    union,
)
from tests.support.layouts import (
    Case,
    block_positions,
    bucket_ids,
    cases,
    expected_counts,
    local_ids,
    parameters_of,
    received_ids,
)


@pytest.fixture(autouse=True, scope="module")
def cut_anywhere() -> Iterator[None]:
    """Shares of columns begin anywhere in a row, not at the alignment of these small models."""
    with patch.object(transfer_role, "UNIT_ALIGNMENT_ELEMENTS", 1):
        yield


@given(cases())
def test_columns_share_exactly_what_one_of_them_would_hold(case: Case) -> None:
    """Of what tp cuts, and of experts, a replica with shared weights holds every element once."""
    for replica in case.strategy.replicas:
        if not replica.scheme.shares_weights:
            continue
        roles = [role for rank in replica.ranks if (role := case.roles[rank])]
        for bucket in case.layout.buckets:
            shares = [held_ranges(case.layout, bucket, role) for role in roles]
            num_held = 0
            for piece in bucket.pieces:
                is_cut = case.layout.parameters[piece.parameter].tp_dim is not None
                num_held += piece.num_elements * (1 if is_cut else replica.scheme.tp)
            assert sum(map(num_elements, shares)) == num_held
            assert num_elements(union(shares)) == bucket.num_elements
            for role, share in zip(roles, shares, strict=True):
                whole = held_ranges(case.layout, bucket, replace(role, column=None, holder=None))
                assert union([whole, share]) == whole


@given(cases())
def test_buckets_hold_every_element_once(case: Case) -> None:
    ids = np.concatenate([bucket_ids(case, bucket) for bucket in case.layout.buckets])
    assert len(ids) == case.layout.num_elements
    np.testing.assert_array_equal(np.sort(ids), np.arange(len(ids)))


@given(cases())
def test_shards_partition_every_bucket_at_row_borders(case: Case) -> None:
    for bucket in case.layout.buckets:
        rows = {0}
        for piece, offset in zip(bucket.pieces, bucket.piece_offsets, strict=False):
            rows |= {offset + r * piece.row_length for r in range(piece.num_rows + 1)}
        at = 0
        for rank in range(case.layout.num_ranks):
            start, stop = bucket.shard_range(rank)
            assert start == at
            assert stop >= start
            assert {start, stop} <= rows
            at = stop
        assert at == bucket.num_elements


@given(cases())
def test_shards_are_equal_up_to_a_row(case: Case) -> None:
    num_ranks = case.layout.num_ranks
    for bucket in case.layout.buckets:
        longest_row = max(piece.row_length for piece in bucket.pieces)
        for rank in range(num_ranks):
            start, stop = bucket.shard_range(rank)
            assert abs((stop - start) - bucket.num_elements / num_ranks) <= longest_row + 1


@given(cases())
def test_ranges_partition_what_each_rank_holds(case: Case) -> None:
    """In every bucket a rank's ranges are the numbers of exactly the elements that it holds."""
    for role in case.roles:
        found = []
        for bucket in case.layout.buckets:
            ids = bucket_ids(case, bucket)
            ranges = held_ranges(case.layout, bucket, role)
            for before, after in itertools.pairwise(ranges):
                assert before.stop < after.start, "adjacent ranges are merged"
            found += [ids[r.start : r.stop] for r in ranges]
        held = np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
        expected = (
            np.concatenate(
                [local_ids(case, index, role).reshape(-1) for index in parameters_of(case, role)]
            )
            if role is not None
            else np.zeros(0, dtype=np.int64)
        )
        np.testing.assert_array_equal(held, np.sort(expected[expected >= 0]))


@given(cases())
def test_blocks_tile_every_local_parameter_once_with_what_the_gather_brings(case: Case) -> None:
    roles = case.roles
    arrived: list[dict[int, np.ndarray]] = []
    written: list[dict[int, np.ndarray]] = []
    for role in roles:
        held = [] if role is None else parameters_of(case, role)
        sizes = {i: case.layout.parameters[i].num_elements for i in held}
        if role is not None:
            sizes = {i: local_ids(case, i, role).size for i in held}
        arrived.append({i: np.full(size, -1, dtype=np.int64) for i, size in sizes.items()})
        written.append({i: np.zeros(size, dtype=np.int64) for i, size in sizes.items()})
    for bucket in case.layout.buckets:
        ids = bucket_ids(case, bucket)
        plan = gather_plan(case.layout, bucket, roles)
        for rank, role in enumerate(roles):
            stream = received_ids(plan, ids, rank)
            at = 0
            for parameter, positions in [] if role is None else block_positions(case, bucket, role):
                arrived[rank][parameter][positions] = stream[at : at + len(positions)]
                written[rank][parameter][positions] += 1
                at += len(positions)
            assert at == len(stream)
    for rank, role in enumerate(roles):
        for parameter, found in arrived[rank].items():
            assert role is not None
            expected = local_ids(case, parameter, role).reshape(-1)
            np.testing.assert_array_equal(written[rank][parameter], expected >= 0)
            np.testing.assert_array_equal(found, expected)


@given(cases())
def test_gradients_reach_their_owner_as_often_as_the_rules_say(case: Case) -> None:
    roles = case.roles
    counts = np.zeros(case.layout.num_elements, dtype=np.int64)
    for bucket in case.layout.buckets:
        ids = bucket_ids(case, bucket)
        plan = scatter_plan(case.layout, bucket, roles)
        for rank, role in enumerate(roles):
            # The rank's send buffer, read from its local gradients block by block.
            blocks = [] if role is None else block_positions(case, bucket, role, contributed=True)
            parts = [
                local_ids(case, parameter, role).reshape(-1)[positions]
                for parameter, positions in blocks
                if role is not None
            ]
            stream = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            at = 0
            for transfer in plan.sent_by(rank):
                start, stop = bucket.shard_range(transfer.destination)
                for r in transfer.ranges:
                    assert start <= r.start < r.stop <= stop, "owners get only what they own"
                    num = r.num_elements
                    np.testing.assert_array_equal(stream[at : at + num], ids[r.start : r.stop])
                    counts[ids[r.start : r.stop]] += 1
                    at += num
            assert at == len(stream)
    np.testing.assert_array_equal(counts, expected_counts(case))


@given(cases())
def test_contributed_ranges_are_a_prefix_of_held_ranges(case: Case) -> None:
    for bucket in case.layout.buckets:
        for role in case.roles:
            held = _elements(held_ranges(case.layout, bucket, role))
            contributed = _elements(contributed_ranges(case.layout, bucket, role))
            assert held[: len(contributed)] == contributed


@given(cases())
def test_the_inverse_reverses_every_transfer_and_its_inverse_is_the_plan(case: Case) -> None:
    for bucket in case.layout.buckets:
        for plan in (
            gather_plan(case.layout, bucket, case.roles),
            scatter_plan(case.layout, bucket, case.roles),
        ):
            turned = plan.inverse()
            assert turned.inverse() == plan
            assert {(t.source, t.destination, t.ranges) for t in turned.transfers} == {
                (t.destination, t.source, t.ranges) for t in plan.transfers
            }
            for rank in range(case.layout.num_ranks):
                received = link_elements(plan, rank, ranks_per_node=None).received
                assert link_elements(turned, rank, ranks_per_node=None).sent == received


@given(cases())
def test_a_rank_receives_the_elements_that_it_holds_and_does_not_own(case: Case) -> None:
    roles = case.roles
    plans = [gather_plan(case.layout, bucket, roles) for bucket in case.layout.buckets]
    for rank, role in enumerate(roles):
        held, owned = set(), set()
        for bucket in case.layout.buckets:
            ids = bucket_ids(case, bucket)
            start, stop = bucket.shard_range(rank)
            owned |= set(ids[start:stop].tolist())
        for index in [] if role is None else parameters_of(case, role):
            assert role is not None
            held |= set(local_ids(case, index, role).reshape(-1).tolist()) - {-1}
        exchanged = [link_elements(plan, rank, ranks_per_node=None) for plan in plans]
        received, sent = sum(e.received for e in exchanged), sum(e.sent for e in exchanged)
        assert received == len(held - owned)
        others = [other for r, other in enumerate(roles) if r != rank and other is not None]
        wanted = [
            len(owned & set(local_ids(case, i, other).reshape(-1).tolist()))
            for other in others
            for i in parameters_of(case, other)
        ]
        assert sent == sum(wanted)


@given(cases())
def test_a_rank_s_own_plan_is_its_part_of_the_whole(case: Case) -> None:
    """Plans that ranks compute independently match: no rank waits for a message that none sends."""
    for bucket in case.layout.buckets:
        for make in (gather_plan, scatter_plan):
            whole: TransferPlan = make(case.layout, bucket, case.roles)
            for rank in range(case.layout.num_ranks):
                own = make(case.layout, bucket, case.roles, rank=rank)
                assert own.transfers == tuple(
                    t for t in whole.transfers if rank in (t.source, t.destination)
                )


def _elements(ranges: tuple) -> list[int]:
    return [element for r in ranges for element in range(r.start, r.stop)]
