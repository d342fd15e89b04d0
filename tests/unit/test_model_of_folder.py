"""``--hf`` of the commands that plan: a Hugging Face folder instead of the model's flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import _flags_of_folder, main
from megatron.hydraulis.command_line import CommandParser

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
FLAGS = (
    *("--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "384", "--swiglu"),
    *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4"),
    *("--kv-channels", "16", "--qk-layernorm", "--vocab-size", "2048", "--bf16"),
)
RANK = (
    *("recommend-layout", "--device", "a100-80g", "--num-ranks", "4"),
    *("--seq-length", "1024", "--global-batch-size", "8"),
)
NEXT = "next: hydraulis advise "


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*RANK, *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_is_its_models_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, _, command = output(capsys, "--hf", str(folder)).partition(NEXT)
    expected, _, of_flags = output(capsys, *FLAGS).partition(NEXT)
    assert table == expected
    assert f"--hf {folder}" in command
    assert "--num-layers" in of_flags
    assert "--num-layers" not in command
    more, _, command = output(capsys, f"--hf={folder}", "--num-layers", "8").partition(NEXT)
    assert f"--hf {folder} --num-layers 8 " in command
    assert more == output(capsys, *FLAGS, "--num-layers", "8").partition(NEXT)[0]  # given flags win
    in_fp32, _, _ = output(capsys, "--hf", str(folder), "--fp32").partition(NEXT)
    assert in_fp32 != table


def test_commands_that_follow_have_the_adapters(folder: Path) -> None:
    parser = CommandParser()
    parser.add_argument("--num-layers")
    words = ["--lora-rank", "4", "--lora-targets", "q_proj", "fc1"]
    assert _flags_of_folder(parser, ["--hf", str(folder), *words, "--fp32"])
    assert parser.get_default("training_words")[:-1] == ("--hf", str(folder), *words)


def test_folders_that_are_no_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "config.json"
    assert main([*RANK, "--hf", str(folder), "--model", "examples/model_llama32b.json"]) == 2
    assert "whole model but --hf is given too" in capsys.readouterr().err
    config.write_text(json.dumps(CONFIG | {"model_type": "gemma"}))
    assert main([*RANK, "--hf", str(folder)]) == 2
    assert "'gemma'" in capsys.readouterr().err
    config.unlink()
    assert main([*RANK, "--hf", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err
