from __future__ import annotations

import dataclasses
import re
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.hydraulis.cost_model.context import choose_way
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.attention import SegmentAttention
from megatron.hydraulis.runtime.core_attention import (
    RowKind,
    TEAttention,
    packed_arguments,
    te_kernel,
    te_obstacle,
)
from megatron.hydraulis.runtime.process_groups import LocalGroup, local_collection
from tests.support.context_probes import packed, run_attention
from tests.support.models import SmallModel
from tests.support.varlen_stand_in import causal_attention


class DotProductAttention(torch.nn.Module):
    """Replaces Transformer Engine's attention, with its signature (2.20), on any device.

    Records its arguments; computes attention if the row is not shared.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.built = dict(locals())
        self.scale = softmax_scale
        self.arguments: dict[str, Any] = {}
        self.context: tuple[Any, ...] = ()

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.context = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        self.arguments = dict(locals())
        assert cu_seqlens_q is not None
        if self.context[0] is not None:
            return query_layer.flatten(1, 2)
        borders = cu_seqlens_q.tolist()
        return causal_attention(query_layer, key_layer, value_layer, borders, borders, self.scale)


MODEL = SmallModel(hidden_size=32, num_heads=4, num_groups=2)
HEAD_SIZE = 8


def attention(
    cp_comm_type: Any = None,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **changes: Any,
) -> TEAttention:
    config = MODEL.transformer()
    config.cp_comm_type = cp_comm_type
    for name, value in changes.items():
        setattr(config, name, value)
    return TEAttention(
        config,
        3,
        AttnMaskType.causal,
        "self",
        softmax_scale=0.25,
        cp_comm_type="ignored",
        make_attention=DotProductAttention,
        pg_collection=local_collection(),
        k_channels=k_channels,
        v_channels=v_channels,
    )


def tensors(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(num_tokens, heads, HEAD_SIZE) for heads in (4, 2, 2)]
    shapes.append((num_tokens, 32))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_how_it_is_built() -> None:
    built = attention(tensor_model_parallel_size=2, sequence_parallel=True).attention.built
    group = built["tp_group"]
    assert isinstance(group, LocalGroup)
    expected = {
        "num_attention_heads": 4,
        "kv_channels": 8,
        "num_gqa_groups": 2,
        "attention_dropout": 0.0,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "sequence_parallel": True,
        "tp_size": 2,
        "layer_number": 3,
        "attention_type": "self",
        "softmax_scale": 0.25,
    }
    assert {name: built[name] for name in expected} == expected


def test_holds_no_parameters() -> None:
    assert not list(attention().parameters())


def test_whole_rows_attend_as_segments_do() -> None:
    lengths = [5, 1, 9, 2]  # the last is padding, a segment as well
    given = tensors(17)
    reference = SegmentAttention(
        MODEL.transformer(), 1, AttnMaskType.causal, "self", softmax_scale=0.25
    )
    found = run_attention(attention(), given, packed(lengths, lengths))  # type: ignore[arg-type]
    expected = run_attention(reference, given, packed(lengths, lengths))  # type: ignore[arg-type]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [6, 12])
def test_values_of_another_size_are_padded_for_other_kernels_only(size: int) -> None:
    lengths = [5, 1, 9, 2]
    query, key, value, gradient = tensors(17)
    given = [query, key, torch.nn.functional.pad(value, (0, size - HEAD_SIZE)), gradient]
    given[2][..., HEAD_SIZE:] = value[..., : max(0, size - HEAD_SIZE)]
    given[3] = torch.nn.functional.pad(gradient, (0, 4 * size - 32))
    own = attention(k_channels=HEAD_SIZE, v_channels=size)
    assert own.attention.built["kv_channels"] == (HEAD_SIZE, size)
    reference = SegmentAttention(
        MODEL.transformer(), 1, AttnMaskType.causal, "self", softmax_scale=0.25
    )
    found = run_attention(own, given, packed(lengths, lengths))  # type: ignore[arg-type]
    expected = run_attention(reference, given, packed(lengths, lengths))  # type: ignore[arg-type]
    assert own.attention.arguments["value_layer"].shape == (17, 2, size)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_true_and_padded_borders_of_a_whole_row_are_one() -> None:
    arguments = packed_arguments(packed([5, 3], [5, 3]))
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_q_padded"]
    assert arguments["cu_seqlens_kv"] is arguments["cu_seqlens_kv_padded"]
    assert arguments["pad_between_seqs"] is False
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_kv"]) == (5, 5)
    assert arguments["qkv_format"] == "thd"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 6])
    return LocalGroup(size=2)


def test_a_shared_row_has_its_group_and_padded_borders(group: Any) -> None:
    module = attention()
    row = packed([5, 3], [8, 4], group)
    query, key, value, _ = tensors(6)
    module(query, key, value, None, packed_seq_params=row)
    assert module.attention.context[:3] == (group, [4, 6], None)
    arguments = module.attention.arguments
    assert arguments["cu_seqlens_q"].tolist() == [0, 8, 12]
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_q_padded"]
    assert arguments["max_seqlen_q"] == 8
    assert arguments["pad_between_seqs"] is False
    assert arguments["attention_mask"] is None


def test_the_group_of_a_micro_batch_does_not_affect_the_next(group: Any) -> None:
    module = attention()
    query, key, value, _ = tensors(6)
    module(query, key, value, None, packed_seq_params=packed([5, 3], [8, 4], group))
    module(query, key, value, None, packed_seq_params=packed([6], [6]))
    assert module.attention.context[:3] == (None, None, None)


@pytest.mark.parametrize(
    ("wish", "heads", "groups", "size", "way"),
    [
        ("auto", 32, 8, 2, "p2p"),  # 80 head vectors against 48
        ("auto", 32, 8, 8, "p2p"),  # 140 against 336, which hide
        ("auto", 32, 32, 8, "p2p"),  # 224 against 1,344: 1,344 · 4,110 < 7/8 · 7 · 32 · 32,768
        ("auto", 32, 16, 16, "a2a"),  # not behind 16 ranks, which use the network
        ("auto", 32, 2, 8, "p2p"),  # groups are not repeated
        ("p2p", 32, 32, 4, "p2p"),
        ("all_gather", 32, 32, 4, "all_gather"),
        ("a2a", 32, 8, 8, "a2a"),
    ],
)
def test_way(wish: str, heads: int, groups: int, size: int, way: str) -> None:
    assert choose_way(wish, heads, groups, size, has_te=True) == way


def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(ConfigurationError, match=r"multiples of 8 heads and query groups on .* 2;"):
        choose_way("a2a", 32, 2, 8, has_te=True)


def test_unpacked_input_and_dropout_are_refused() -> None:
    query, key, value, _ = tensors(6)
    with pytest.raises(ConfigurationError, match="packed rows but was given"):
        attention()(query, key, value, None)
    with pytest.raises(ConfigurationError, match=r"dropout is 0\.1"):
        attention(attention_dropout=0.1)


@dataclasses.dataclass
class AttentionParams:
    """Transformer Engine's, of an older version that has fewer fields."""

    num_heads: int
    head_dim_qk: int
    cp_comm_type: str
    pad_between_seqs: bool
    max_seqlen_q: int


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine's rules: a function of their parameters that the test replaces."""
    path = "transformer_engine.pytorch.attention.dot_product_attention"
    utils = types.ModuleType("utils")
    utils.AttentionParams = AttentionParams  # type: ignore[attr-defined]
    names = path.split(".")
    for depth in range(len(names)):
        name = ".".join(names[: depth + 1])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[path], "utils", utils, raising=False)
    monkeypatch.setitem(sys.modules, path + ".utils", utils)
    return utils


FLASH: tuple[Any, ...] = (True, "2.8.3", False, None, False, [])
CUDNN: tuple[Any, ...] = (False, None, True, 1, False, [])
UNFUSED: tuple[Any, ...] = (False, None, False, None, True, [])
NONE: tuple[Any, ...] = (False, None, False, None, False, [])


@pytest.mark.parametrize(
    ("selected", "head_size", "obstacle"),
    [
        (FLASH, 128, None),
        (FLASH, 104, None),
        (CUDNN, 128, None),
        (CUDNN, 96, None),
        (CUDNN, 104, "longest of them unless heads are a multiple of 16 .* of 104 on this GPU"),
        (UNFUSED, 128, "only its unfused kernel, .* 2 ranks .p2p. with 4 heads .2 groups"),
        (NONE, 128, "has no kernel for packed rows shared by 2 ranks"),
    ],
)
def test_a_refusal_by_its_selection_is_an_obstacle(
    selection: Any, selected: tuple[Any, ...], head_size: int, obstacle: str | None
) -> None:
    selection.get_attention_backend = lambda asked: selected
    found = te_obstacle(
        RowKind(4, 2, 2, 64), dtype=torch.bfloat16, head_size=head_size, cp_comm_type="p2p"
    )
    assert found is None if obstacle is None else re.search(obstacle, str(found))


def test_sizes_of_values_count(selection: Any) -> None:
    selection.get_attention_backend = lambda asked: CUDNN
    row = RowKind(4, 4, value_head_size=100)
    found = te_obstacle(row, dtype=torch.bfloat16, head_size=192, cp_comm_type="auto")
    assert found is not None
    assert "4 heads (4 groups) of 192 (values: 100)" in found


def test_the_arguments_of_its_selection(selection: Any) -> None:
    asked: list[AttentionParams] = []

    def select(parameters: AttentionParams) -> tuple[Any, ...]:
        asked.append(parameters)
        return FLASH

    selection.get_attention_backend = select
    kernel = te_kernel(RowKind(4, 2, 2, 64), "a2a", dtype=torch.bfloat16, head_size=128)
    assert kernel == "flash-attn 2.8.3"
    assert asked == [AttentionParams(4, 128, "a2a", False, 64)]


def test_query_groups_that_it_cannot_share_are_an_obstacle() -> None:
    found = te_obstacle(RowKind(4, 1, 2), dtype=torch.bfloat16, head_size=128, cp_comm_type="a2a")
    assert found is not None
    assert "multiples of 2 heads and query groups" in found


@pytest.mark.parametrize(("frequency", "expected"), [(None, (5, 0)), (2, (5, 0)), (3, None)])
def test_only_windowed_layers_pass_a_window(
    frequency: int | None, expected: tuple[int, int] | None
) -> None:
    """The layer is the third one."""
    own = attention(window_size=(5, 0), window_attn_skip_freq=frequency)
    run_attention(own, tensors(9), packed([9], [9]))  # type: ignore[arg-type]
    assert own.attention.arguments["window_size"] == expected


@pytest.mark.parametrize(
    ("window_size", "frequency", "has_windows"),
    [(None, None, False), ((-1, 0), None, False), ((5, 0), None, True), ((5, 0), 1, False)],
)
def test_a_model_has_windows_if_the_cost_model_counts_one(
    window_size: tuple[int, int] | None, frequency: int | None, has_windows: bool
) -> None:
    own = attention(window_size=window_size, window_attn_skip_freq=frequency)
    assert own.has_windows is has_windows
