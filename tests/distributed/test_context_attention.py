"""Attention of a context-parallel group equals that of one rank, forward and backward."""

from dataclasses import replace

import pytest
import torch

from tests.support.context_probes import (
    Kept,
    SharedAttention,
    kept_between,
    shared_against_whole,
    shared_by_unequal_kernels,
)
from tests.support.gloo_pool import WorkerFailure, pool_of
from tests.support.varlen_stand_in import SharedVarlen, varlen_against_whole

pytestmark = pytest.mark.distributed

FP64_TOLERANCE = 1e-10
LENGTHS = {
    "unequal": (37, 8, 21),
    "below 2·cp": (3, 5, 1, 2),
    "one token": (1,),
    "one after another": (1, 1, 1, 1, 1),
    "longer than a block": (2100,),
}
GROUPS = {
    "cp2": ((0, 1),),
    "cp2 turned round": ((1, 0),),
    "cp4": ((0, 1, 2, 3),),
    "two of cp2": ((0, 1), (2, 3)),
    "cp1 and cp2": ((0,), (2, 1), (3,)),
}


def check(case: SharedAttention, tolerance: float = FP64_TOLERANCE) -> None:
    num_ranks = sum(len(group) for group in case.groups)
    for errors in pool_of(num_ranks).run(shared_against_whole, case):
        assert len(errors) == 4
        assert max(errors) < tolerance, errors


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_one_rank(way: str, groups: str, lengths: str) -> None:
    check(SharedAttention(GROUPS[groups], LENGTHS[lengths], way))


@pytest.mark.parametrize("way", ["all_gather", "a2a", "auto", "p2p"])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(8, 4), (8, 2), (4, 1)])
def test_fewer_groups_than_heads(way: str, num_heads: int, num_groups: int) -> None:
    lengths = LENGTHS["unequal"]
    check(SharedAttention(GROUPS["cp4"], lengths, way, num_heads, num_groups))


def test_heads_that_do_not_divide_are_gathered() -> None:
    check(SharedAttention(GROUPS["cp4"], LENGTHS["unequal"], "auto", 6, 6))
    with pytest.raises(WorkerFailure, match="a2a over 4 context-parallel ranks needs a multiple"):
        check(SharedAttention(GROUPS["cp4"], LENGTHS["unequal"], "a2a", 6, 6))


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("window", [1, 3, 600])
@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("lengths", ["unequal", "longer than a block"])
def test_windows_and_offsets_equal_one_rank(
    lengths: str, way: str, window: int, softmax_type: str
) -> None:
    case = SharedAttention(GROUPS["cp1 and cp2"], LENGTHS[lengths], way, num_groups=2)
    check(replace(case, window=window, softmax_type=softmax_type))


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
def test_low_precision(way: str) -> None:
    check(SharedAttention(GROUPS["cp4"], LENGTHS["unequal"], way, dtype=torch.float32), 1e-5)
    check(SharedAttention(GROUPS["cp4"], LENGTHS["unequal"], way, dtype=torch.bfloat16), 0.05)


@pytest.mark.parametrize("window", [None, 0, 4])
@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("lengths", ["unequal", "below 2·cp"])
def test_each_pack_runs_one_kernel(way: str, lengths: str, window: int | None) -> None:
    case = SharedVarlen(
        GROUPS["cp1 and cp2"], LENGTHS[lengths], way, num_heads=4, num_groups=2, window=window
    )
    for errors in pool_of(4).run(varlen_against_whole, case):
        assert max(errors) < FP64_TOLERANCE, errors


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_a_rank_keeps_its_part_and_gathers_again_in_the_backward(
    softmax_type: str, window: int | None
) -> None:
    case = SharedAttention(
        GROUPS["cp2"],
        LENGTHS["longer than a block"],
        "all_gather",
        window=window,
        softmax_type=softmax_type,
    )
    num_layers = 3
    for kept in pool_of(2).run(kept_between, case, num_layers):
        # A mask for each size of a block with window and offset, else one; layers share them.
        num_masks = 1 if window is None or softmax_type == "vanilla" else kept.num_masks
        assert kept == Kept(False, num_masks, (num_layers, num_layers))
        assert kept.num_masks <= 3


def test_ranks_may_run_kernels_that_keep_different_things() -> None:
    """If only a rank that dropped something gathered again, it would gather without the others."""
    case = SharedAttention(GROUPS["cp2"], LENGTHS["unequal"], "all_gather", 4, 2)
    for errors in pool_of(2).run(shared_by_unequal_kernels, case):
        assert max(errors) < FP64_TOLERANCE, errors
