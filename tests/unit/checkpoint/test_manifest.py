"""The manifest: content, damage, and which of Megatron's arguments define the same model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.hydraulis.checkpoint.manifest import (
    MODEL_ARGUMENTS,
    OFF_BY_DEFAULT,
    Manifest,
    known_settings,
    model_differences,
    model_of,
    records_of,
)
from megatron.hydraulis.errors import CheckpointError
from tests.unit.flags.argument_command import parse


def test_upstream_has_all_of_these_arguments(tmp_path: Path) -> None:
    args = parse(tmp_path).args
    missing = {name for name in (*MODEL_ARGUMENTS, *OFF_BY_DEFAULT) if not hasattr(args, name)}
    assert missing == {"softmax_scale"}  # of other versions of upstream
    assert [name for name in OFF_BY_DEFAULT if getattr(args, name, None)] == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--norm-epsilon 1e-3", ["layernorm_epsilon is 1e-05 there and 0.001 here"]),
        ("--use-rope-scaling", ["use_rope_scaling is False there and True here"]),
        (
            "--rotary-seq-len-interpolation-factor 2",
            ["rotary_seq_len_interpolation_factor is None there and 2 here"],
        ),
        ("--window-size 8,0", ["window_size is off there and [8, 0] here"]),
        ("--squared-relu", ["squared_relu is off there and True here"]),
        ("--lr 1e-4", []),
    ],
)
def test_flags_that_change_the_model(typed: str, message: list[str], tmp_path: Path) -> None:
    rope = ("--position-embedding-type", "rope")
    there, here = (model_of(parse(tmp_path, *rope, *more).args) for more in ((), typed.split()))
    assert model_differences(there, here) == message
    assert model_differences(there, there) == []


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (
            "--position-embedding-type yarn",
            "--yarn-beta-fast 32 --yarn-correction-range-round-to-int",
        ),
        ("--window-size 8,0 --window-attn-skip-freq 2", "--window-attn-skip-freq [1,0,1,0]"),
    ],
)
def test_two_ways_to_write_a_model_are_no_difference(typed: str, same: str, tmp_path: Path) -> None:
    there = model_of(parse(tmp_path, *typed.split()).args)
    here = model_of(parse(tmp_path, *typed.split(), *same.split()).args)
    assert there != here
    assert model_differences(there, here) == model_differences(here, there) == []


def test_a_factor_without_effect_does_not_change_the_model() -> None:
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
    other = scaled | {"rope_scaling_factor": 4.0}
    there, here = (model_of(Namespace(**each)) for each in (scaled, other))
    assert model_differences(there, here) == ["rope_scaling_factor is 8.0 there and 4.0 here"]
    off = {"use_rope_scaling": False}
    there, here = (model_of(Namespace(**(each | off))) for each in (scaled, other))
    assert model_differences(there, here) == []


def test_arguments_without_a_flag_here_are_attributed_to_plain_megatron() -> None:
    here = model_of(Namespace(num_layers=2, squared_relu=False, window_size=None))
    there = model_of(Namespace(num_layers=2, squared_relu=True, window_size=(64, 0)))
    assert model_differences(there, here) == [
        "squared_relu is True there and off here",
        "window_size is [64, 0] there and off here",
    ]
    assert model_differences(there, here, of=()) == model_differences(there, here)


def test_another_program_may_not_have_stored_what_is_on_here() -> None:
    there, here = {"num_layers": 2}, {"num_layers": 2, "window_size": [4, 0]}
    assert model_differences(there, here, of=known_settings({"num_layers": 2})) == []
    known = known_settings({"num_layers": 2, "window_size": None})
    for of in (known, OFF_BY_DEFAULT):
        differences = model_differences(there, here, of=of)
        assert differences == ["window_size is off there and [4, 0] here"]


def test_earlier_argument_names_are_read() -> None:
    there = model_of(Namespace(norm_epsilon=1e-6))
    assert model_differences(there, {"layernorm_epsilon": 1e-5}) == [
        "layernorm_epsilon is 1e-06 there and 1e-05 here"
    ]


def test_one_query_group_per_head_equals_no_groups() -> None:
    plain = Namespace(group_query_attention=False, num_query_groups=1, num_attention_heads=4)
    assert model_of(plain)["num_query_groups"] == 4


def manifest_of(path: Path) -> Manifest:
    return Manifest(
        iteration=3,
        num_ranks=2,
        model={"num_layers": 2, "norm_epsilon": 1e-5},
        state={"sampler": {"epoch": 1, "position": 7, "seed": 3}},
        configuration={"lr": 0.1},
        files=records_of(path),
    )


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    manifest = manifest_of(tmp_path)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert manifest.problems(tmp_path) == []
    assert manifest.num_bytes == 3


def test_only_a_manifest_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Manifest.read(tmp_path)
    (tmp_path / "hydraulis.json").symlink_to("hydraulis.json")
    with pytest.raises(CheckpointError, match=r"hydraulis\.json.* symbolic links"):
        Manifest.read(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    manifest_of(tmp_path).write(tmp_path)
    path = tmp_path / "hydraulis.json"
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            found = Manifest.read(tmp_path)
        except CheckpointError:
            continue
        assert found.to_json() == manifest_of(tmp_path).to_json()  # a blank between two values


def test_every_reader_gets_a_share_and_every_file_is_read(tmp_path: Path) -> None:
    for size in range(7):
        (tmp_path / f"{size}").write_bytes(bytes(size))
    manifest = manifest_of(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"changed")
    shares = [manifest.problems(tmp_path, share=share, num_shares=3) for share in range(3)]
    assert [len(share) for share in shares] == [3, 2, 2]
    assert sorted(problem[0] for share in shares for problem in share) == list("0123456")
