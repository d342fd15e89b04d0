"""A stand-in for ``torch.nn.attention.varlen.varlen_attn``, which runs only on CUDA."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.hydraulis.runtime.attention import ContextAttention
from megatron.hydraulis.runtime.core_attention import VarlenAttention
from tests.support.context_probes import SharedAttention, shared_against_whole


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch 2.13's signature and rules; (queries, heads, head size)."""
    assert cu_seq_k is not None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size[1] == 0, "only causal attention is supported here"
    assert enable_gqa == (query.size(1) != key.size(1))
    borders, key_borders = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert max_q == max(b - a for a, b in itertools.pairwise(borders))
    assert max_k == max(b - a for a, b in itertools.pairwise(key_borders))
    flat = causal_attention(query, key, value, borders, key_borders, scale, window_size[0])
    return flat.unflatten(1, query.shape[1:])


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Sequence[int],
    key_borders: Sequence[int],
    scale: float | None,
    window: int = -1,
) -> Tensor:
    """(queries, heads · head size) by explicit scores; a segment's last query sees its last key,
    and as many before as the window has, -1 for all."""
    assert borders[-1] == query.size(0)
    assert key_borders[-1] == key.size(0)
    num_copies = query.size(1) // key.size(1)
    key, value = (each.repeat_interleave(num_copies, dim=1) for each in (key, value))
    attended = []
    for i in range(len(borders) - 1):
        q = query[borders[i] : borders[i + 1]].transpose(0, 1)
        part = slice(key_borders[i], key_borders[i + 1])
        k, v = key[part].transpose(0, 1), value[part].transpose(0, 1)
        scores = q @ k.transpose(1, 2) * (query.size(2) ** -0.5 if scale is None else scale)
        last = k.size(1) - q.size(1)
        sees = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(last)
        if window >= 0:
            sees = sees.triu(last - window)
        attended.append((scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(attended).flatten(1)


@dataclass(frozen=True)
class SharedVarlen(SharedAttention):
    """`SharedAttention` by torch's kernel or its stand-in."""

    def attention(self) -> ContextAttention:
        config = super().attention().config
        return VarlenAttention(config, 1, AttnMaskType.causal, "self")


def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in place of the kernel's module, which imports torch's compiler."""
    module = types.ModuleType("torch.nn.attention.varlen")
    vars(module)["varlen_attn"] = varlen_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)


def varlen_against_whole(case: SharedVarlen) -> list[float]:
    """`shared_against_whole` with the stand-in in the kernel's place."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_kernel(monkeypatch)
        return shared_against_whole(case)
