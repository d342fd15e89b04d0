"""Attention of a context-parallel group beside that of one rank which holds the whole row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.hydraulis.data.context_split import local_places, row_segments
from megatron.hydraulis.runtime.context_attention import ContextAttention
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
        return ContextAttention(config, 1, AttnMaskType.causal, "self")

    def tensors(self, num_tokens: int) -> list[Tensor]:
        """Queries, keys, values and the gradient of the outcome, of a whole row."""
        generator = torch.Generator().manual_seed(num_tokens)
        heads = (self.num_heads, self.num_groups, self.num_groups)
        shapes: list[tuple[int, ...]] = [(num_tokens, n, HEAD_SIZE) for n in heads]
        shapes.append((num_tokens, self.num_heads * HEAD_SIZE))
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [each.to(self.dtype) for each in drawn]


def packed(lengths: list[int], padded: list[int], group: Any = None) -> PackedSeqParams:
    """Upstream's description of a row."""
    borders = [torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (lengths, padded)]
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
    registry = worker_groups()
    mine = None
    for ranks in groups:
        found = registry._groups.get(ranks)
        if found is None:
            found = torch.distributed.new_group(list(ranks), sort_ranks=False)
            registry._groups[ranks] = found
        if torch.distributed.get_rank() in ranks:
            mine = found
    assert mine is not None
    return mine


def run_attention(
    attention: ContextAttention, tensors: list[Tensor], description: PackedSeqParams
) -> list[Tensor]:
    """Outcome and gradients of queries, keys and values."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    outcome = attention(*inputs, None, packed_seq_params=description)
    outcome.backward(tensors[3])
    return [outcome.detach(), *(each.grad for each in inputs if each.grad is not None)]


def shared_beside_whole(case: SharedAttention) -> list[float]:
    """On every rank: largest difference of outcome and three gradients to those of one rank.

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
