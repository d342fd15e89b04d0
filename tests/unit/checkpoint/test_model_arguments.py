"""What must be alike in a run and the checkpoint that it loads, by upstream's own arguments."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.hydraulis.checkpoint.manifest import (
    MODEL_ARGUMENTS,
    NEVER_ON_HERE,
    model_differences,
    model_of,
)
from tests.unit.argument_command import parse


def test_upstream_has_all_of_them_under_these_names(tmp_path: Path) -> None:
    args = parse(tmp_path).args
    missing = {name for name in (*MODEL_ARGUMENTS, *NEVER_ON_HERE) if not hasattr(args, name)}
    assert missing == {"apply_layernorm_1p", "softmax_scale"}  # of other versions of upstream
    assert [name for name in NEVER_ON_HERE if getattr(args, name, None)] == []


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--norm-epsilon 1e-3", ["layernorm_epsilon is 1e-05 there and 0.001 here"]),
        ("--use-rope-scaling", ["use_rope_scaling is False there and True here"]),
        (
            "--rotary-seq-len-interpolation-factor 2",
            ["rotary_seq_len_interpolation_factor is None there and 2 here"],
        ),
        ("--lr 1e-4", []),
    ],
)
def test_flags_that_make_another_model(typed: str, told: list[str], tmp_path: Path) -> None:
    rope = ("--position-embedding-type", "rope")
    there, here = (model_of(parse(tmp_path, *rope, *more).args) for more in ((), typed.split()))
    assert model_differences(there, here) == told
    assert model_differences(there, there) == []


def test_a_factor_without_effect_makes_no_other_model() -> None:
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
    other = scaled | {"rope_scaling_factor": 4.0}
    there, here = (model_of(Namespace(**each)) for each in (scaled, other))
    assert model_differences(there, here) == ["rope_scaling_factor is 8.0 there and 4.0 here"]
    off = {"use_rope_scaling": False}
    there, here = (model_of(Namespace(**(each | off))) for each in (scaled, other))
    assert model_differences(there, here) == []


def test_what_no_flag_here_sets_is_told_of_plain_megatron() -> None:
    here = model_of(Namespace(num_layers=2, squared_relu=False, window_size=None))
    there = model_of(Namespace(num_layers=2, squared_relu=True, window_size=(64, 0)))
    assert model_differences(there, here) == [
        "squared_relu is True there and off here",
        "window_size is (64, 0) there and off here",
    ]


def test_an_earlier_name_counts_as_todays() -> None:
    there = model_of(Namespace(norm_epsilon=1e-6))
    assert model_differences(there, {"layernorm_epsilon": 1e-5}) == [
        "layernorm_epsilon is 1e-06 there and 1e-05 here"
    ]


def test_one_group_a_head_is_no_grouping() -> None:
    plain = Namespace(group_query_attention=False, num_query_groups=1, num_attention_heads=4)
    assert model_of(plain)["num_query_groups"] == 4
