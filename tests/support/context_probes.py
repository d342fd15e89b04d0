"""Attention of a context-parallel group, compared with one rank that holds the whole row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.hydraulis.data.packed_batch import local_places, row_segments
from megatron.hydraulis.runtime import attention as attention_module
from megatron.hydraulis.runtime.attention import ContextAttention
from tests.support.gloo_pool import worker_groups
from tests.support.models import SmallModel

HEAD_SIZE = 8


@dataclass(frozen=True)
class SharedAttention:
    """A row of random queries, keys and values that groups of ranks share."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group; each rank is in one. All run the same row."""
    lengths: tuple[int, ...]
    cp_comm_type: str = "auto"
    num_heads: int = 4
    num_groups: int = 4
    dtype: torch.dtype = torch.float64
    window: int | None = None
    softmax_type: str = "vanilla"

    def attention(self) -> ContextAttention:
        """The core attention of one layer."""
        model = SmallModel(
            hidden_size=HEAD_SIZE * self.num_heads,
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            dtype=self.dtype,
        )
        config = model.transformer()
        config.cp_comm_type = self.cp_comm_type
        config.window_size = None if self.window is None else (self.window, 0)
        config.softmax_type = self.softmax_type
        return ContextAttention(config, 1, AttnMaskType.causal, "self")

    def tensors(self, num_tokens: int) -> list[Tensor]:
        """Queries, keys, values and the gradient of the outcome, of a whole row."""
        generator = torch.Generator().manual_seed(num_tokens)
        heads = (self.num_heads, self.num_groups, self.num_groups)
        shapes: list[tuple[int, ...]] = [(num_tokens, n, HEAD_SIZE) for n in heads]
        shapes.append((num_tokens, self.num_heads * HEAD_SIZE))
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [each.to(self.dtype) for each in drawn]


def packed(
    lengths: Sequence[int], padded: Sequence[int], group: Any = None, device: str = "cpu"
) -> PackedSeqParams:
    """Upstream's description of a row."""
    borders = [
        torch.tensor([0, *each], device=device).cumsum(0).to(torch.int32)
        for each in (lengths, padded)
    ]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders[0],
        cu_seqlens_kv=borders[0],
        cu_seqlens_q_padded=borders[1],
        cu_seqlens_kv_padded=borders[1],
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        local_cp_size=1 if group is None else group.size(),
        cp_group=group,
    )


def group_of(groups: tuple[tuple[int, ...], ...]) -> Any:
    """This rank's group; all ranks create all groups, in one order."""
    rank = dist.get_rank()
    mine = None
    for ranks in groups:
        # Only this rank has the group of one rank from the start, so it must not be created here.
        found = _created(ranks) if len(ranks) > 1 else worker_groups().of_self
        if rank in ranks:
            mine = found
    assert mine is not None
    return mine


@cache
def _created(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks), sort_ranks=False)


def run_attention(
    attention: ContextAttention, tensors: list[Tensor], description: PackedSeqParams
) -> list[Tensor]:
    """Outcome and gradients of queries, keys and values."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    outcome = attention(*inputs, None, packed_seq_params=description)
    outcome.backward(tensors[3])
    return [outcome.detach(), *(each.grad for each in inputs if each.grad is not None)]


def shared_against_whole(case: SharedAttention) -> list[float]:
    """Every rank returns the largest difference of outcome and three gradients to those of one
    rank.

    Relative to the largest value of each. Two layers run the same description of the row.
    """
    group = group_of(case.groups)
    segments, padded = row_segments(case.lengths, context_size=group.size())
    tensors = case.tensors(sum(padded))
    attention = case.attention()
    whole = run_attention(attention, tensors, packed(segments, padded))
    places = torch.from_numpy(local_places(padded, group.size(), group.rank()))
    description = packed(segments, padded, group)
    worst = [0.0] * 4
    for _ in range(2):
        part = run_attention(attention, [each[places] for each in tensors], description)
        errors = [
            float((mine - all_[places]).abs().max() / all_.abs().max())
            for mine, all_ in zip(part, whole, strict=True)
        ]
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return worst


def shared_by_unequal_kernels(case: SharedAttention) -> list[float]:
    """`shared_against_whole`, blocks with a mask by a kernel that keeps copies of its inputs.

    So ranks differ in what autograd keeps: context rank 0 alone has a block of the beginning of a
    sequence, which needs no mask. Which kernels exist depends
    on the device.
    """
    attend = attention_module.F.scaled_dot_product_attention

    def by_two_kernels(*args: Any, **named: Any) -> Tensor:
        is_masked = named.get("attn_mask") is not None
        with sdpa_kernel(SDPBackend.MATH if is_masked else SDPBackend.FLASH_ATTENTION):
            return attend(*args, **named)

    with patch.object(attention_module.F, "scaled_dot_product_attention", by_two_kernels):
        return shared_against_whole(case)


@dataclass(frozen=True)
class Kept:
    """The memory that a layer keeps between forward and backward."""

    has_gathered: bool
    """Whether keys or values are in memory that a kernel received."""
    num_masks: int
    """Masks that autograd keeps; masks that share memory count once."""
    num_gathers: tuple[int, int]
    """All-gathers of the forward and of the backward."""


def kept_between(case: SharedAttention, num_layers: int) -> Kept:
    """Every rank runs as many layers as are asked for before the first backward."""
    group = group_of(case.groups)
    segments, padded = row_segments(case.lengths, context_size=group.size())
    places = torch.from_numpy(local_places(padded, group.size(), group.rank()))
    parts = [each[places] for each in case.tensors(sum(padded))]
    description = packed(segments, padded, group)
    inputs = [each.requires_grad_() for each in parts[:3]]
    received: list[StorageWeakRef] = []
    num_gathers = 0
    attend, gather = attention_module.F.scaled_dot_product_attention, dist.all_gather_into_tensor

    def recorded(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        received.extend(StorageWeakRef(each.untyped_storage()) for each in (k, v))
        return attend(q, k, v, **named)

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return gather(*args, **named)

    with (
        patch.object(attention_module.F, "scaled_dot_product_attention", recorded),
        patch.object(dist, "all_gather_into_tensor", counted),
    ):
        attention = case.attention()
        outcomes = [
            attention(*inputs, None, packed_seq_params=description) for _ in range(num_layers)
        ]
        has_gathered = any(not each.expired() for each in received)
        num_forward = num_gathers
        masks = {mask.untyped_storage().data_ptr() for mask in _saved_masks(outcomes)}
        torch.autograd.backward(outcomes, [parts[3]] * num_layers)
    assert len(received) >= num_layers
    return Kept(has_gathered, len(masks), (num_forward, num_gathers - num_forward))


def _saved_masks(outcomes: list[Tensor]) -> Iterator[Tensor]:
    waiting, seen = [outcome.grad_fn for outcome in outcomes], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [previous for previous, _ in node.next_functions]
        if getattr(node, "_saved_attn_mask", None) is not None:
            yield node._saved_attn_mask
