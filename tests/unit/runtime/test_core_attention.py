import dataclasses
import re

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from benchmarks.inputs import llama_shape
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    Environment,
    RowKind,
    VarlenAttention,
    choose,
    current_environment,
    row_kinds,
    te_obstacle,
)
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.models import SmallModel

HOPPER = Environment(
    compute_capability=(9, 0),
    dtype=torch.bfloat16,
    head_size=128,
    why_no_te=None,
    why_no_varlen=None,
)


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        ({}, "te", "the best available"),
        (
            {"why_no_te": "Transformer Engine is not installed"},
            "torch",
            "not te: Transformer Engine is not installed",
        ),
        ({"compute_capability": (7, 5)}, "te", "the best available"),
        (
            {"compute_capability": (7, 5), "why_no_te": "it is not installed"},
            "sdpa",
            "not te: it is not installed; not torch: its kernel needs compute capability 8.0 but "
            "this GPU has 7.5",
        ),
        (
            {"head_size": 100, "why_no_te": "it is not installed"},
            "sdpa",
            "not te: it is not installed; not torch: its kernel takes heads of a multiple of 8 up "
            "to 256 but they have 100",
        ),
        (
            {"dtype": torch.float32},
            "sdpa",
            "not te: its kernels take bf16 but the model computes in float32; not torch: its "
            "kernels take bf16 but the model computes in float32",
        ),
        (
            {"compute_capability": None},
            "sdpa",
            "not te: there is no CUDA device; not torch: there is no CUDA device",
        ),
        (
            {"why_no_te": "it is old", "why_no_varlen": "torch 2.9 has none"},
            "sdpa",
            "not te: it is old; not torch: torch 2.9 has none",
        ),
    ],
)
def test_auto_chooses_the_best_and_gives_the_reason(
    changes: dict[str, object], name: str, why: str
) -> None:
    chosen = choose("auto", dataclasses.replace(HOPPER, **changes))  # type: ignore[arg-type]
    assert (chosen.name, chosen.why) == (name, why)


@pytest.mark.parametrize("name", CORE_ATTENTIONS)
def test_the_requested_one_is_used(name: str) -> None:
    assert choose(name, HOPPER).name == name
    assert choose(name, HOPPER).why == "requested"


def test_heads_of_latent_attention_have_two_sizes() -> None:
    shape = dataclasses.replace(
        llama_shape(num_query_groups=8),
        kv_channels=128,
        kv_lora_rank=64,
        qk_head_dim=64,
        qk_pos_emb_head_dim=64,
        v_head_dim=192,
    )
    (row,) = row_kinds(Pool.of(Strategy.parse("tp1", 1)), shape, 100)
    assert row.value_head_size == 192
    here = current_environment(dtype=torch.bfloat16, head_size=shape.kv_channels, rows=[row])
    assert here.head_size == 192


def test_an_unavailable_one_is_refused_with_alternatives() -> None:
    here = dataclasses.replace(HOPPER, why_no_te="Transformer Engine is not installed")
    with pytest.raises(ConfigurationError, match=r"te .* not installed; choose torch or sdpa, or"):
        choose("te", here)
    with pytest.raises(ConfigurationError, match="--core-attention flash is none of the 4"):
        choose("flash", here)


def test_on_this_machine() -> None:
    here = current_environment(dtype=torch.bfloat16, head_size=64)
    if not torch.cuda.is_available():
        assert choose("auto", here).name == "sdpa"
    for name in CORE_ATTENTIONS:
        assert isinstance(MODULE_OF[name], type)


def test_kinds_of_rows_of_a_pool() -> None:
    shape = llama_shape(hidden_size=64, ffn_hidden_size=128, vocab_size=64)
    pool = Pool.of(Strategy.parse("tp2cp4~", 8), Strategy.parse("8*tp1", 8))
    assert row_kinds(pool, shape, 4096) == (
        RowKind(8, 4, 1, 4096),
        RowKind(4, 2, 1, 4096, tp=2),
        RowKind(4, 2, 2, 4096, tp=2),
        RowKind(4, 2, 4, 4096, tp=2),
    )
    alone = Pool.of(Strategy.parse("tp1", 1))
    some = dataclasses.replace(shape, num_windowed_layers=1, window_tokens=9)
    assert row_kinds(alone, some, 64) == (
        RowKind(8, 4, 1, 64, has_windows=True),
        RowKind(8, 4, 1, 64, 8, has_windows=True),
    )
    every = dataclasses.replace(some, num_windowed_layers=4)
    assert row_kinds(alone, every, 64) == (RowKind(8, 4, 1, 64, 8, has_windows=True),)


def test_only_the_reference_adds_an_offset_to_the_softmax() -> None:
    here = dataclasses.replace(HOPPER, softmax_type="learnable")
    assert choose("auto", here).name == "sdpa"
    with pytest.raises(ConfigurationError, match=r"only sdpa .* is learnable; choose sdpa, or"):
        choose("te", here)
    config = SmallModel(variant=(("softmax_type", "off-by-one"),)).transformer()
    with pytest.raises(ConfigurationError, match="VarlenAttention does not; use --core-attention"):
        VarlenAttention(config, 1, AttnMaskType.causal, "self")


def test_transformer_engines_ring_takes_no_window() -> None:
    ring = RowKind(2, 2, 2, 64, 8)
    obstacle = te_obstacle(ring, dtype=torch.bfloat16, head_size=64, cp_comm_type="p2p")
    assert re.search("a ring of 2 .* a window of 8 tokens", obstacle or "")
