"""The commands for a GPU, which were not run: today's programs accept them."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.profiler.command import add_arguments, training_defaults

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/results/README.md").read_text("utf-8")
QUICKSTART = (ROOT / "scripts/quickstart.sh").read_text("utf-8")


def commands(beginning: str) -> list[str]:
    """The rest of each command with this beginning, without duplicates."""
    found = re.findall(rf"{re.escape(beginning)}(?: ([^`\n]*))?(?=[`\n])", PAGE)
    assert found, beginning
    return list(dict.fromkeys(found))


def quickstart_flags() -> list[str]:
    """The flags that the script gives to the program, except its corpus."""
    (block,) = re.findall(r"^flags=\((.*?)^\)", QUICKSTART, re.MULTILINE | re.DOTALL)
    flags = shlex.split(block, comments=True)
    for option in ("--data-path", "--split", "--tokenizer-type", "--tokenizer-model"):
        place = flags.index(option)
        del flags[place : place + 2]
    return [*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", "4095"]


@pytest.mark.parametrize("text", commands("bash scripts/quickstart.sh"))
def test_flags_of_a_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # As on a machine with a GPU and Transformer Engine.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda *name: name[0] == "transformer_engine" or found(*name)
    )
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    typed = shlex.split(text)
    num_ranks = 2 if "tp2" in typed else 4
    size = [] if "--global-batch-size" in typed else ["--global-batch-size", "12"]
    resolved = parse_arguments(
        [*quickstart_flags(), *size, *typed], num_ranks=num_ranks, rank=0, needs_data=False
    )
    assert resolved.args.bf16
    assert resolved.pool.num_ranks == num_ranks


def test_flags_of_the_image() -> None:
    (text,) = commands("-m megatron.hydraulis profile")
    own, model = (shlex.split(part) for part in text.split(" -- "))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(own).schemes == ["tp1"]
    assert parse_arguments(
        training_defaults(model), num_ranks=1, rank=0, needs_data=False
    ).args.bf16
